"""The full attention matrix of a prompt. The library never stores this matrix; the definitions may."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the softmax of every row [..., n]: not negative, with sum 1."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def causal_attention(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns A[m, n] = softmax over n <= m of q_m . k_n / sqrt(d): [T, T] float64, zero above the diagonal.

    q, k: [T, d] of one query head and its KV head.
    """
    n_tokens, size = k.shape
    logits = (q.astype(np.float64) @ k.astype(np.float64).T) / np.sqrt(size)
    logits[~np.tri(n_tokens, dtype=bool)] = -np.inf
    return softmax(logits)


def grouped_attention(layer: Layer, head: int) -> np.ndarray:
    """Returns the mean of causal_attention over the query heads that share KV head `head`: [T, T] float64."""
    group = len(layer.q) // len(layer.k)
    heads = range(head * group, (head + 1) * group)
    return np.mean([causal_attention(layer.q[h], layer.k[head]) for h in heads], axis=0)
