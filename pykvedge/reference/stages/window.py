"""Attention of the prompt's last queries, and its smoothing. The scorers window and mixkv share this code.

SnapKV (Li et al. 2024, arXiv:2404.14469), section 4: the last W queries, the observation window, vote on the earlier
tokens, the candidates. Pooling along the tokens keeps neighbours together.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import softmax
from pykvedge.reference.stages.base import Layer


def window_weights(q: np.ndarray, k: np.ndarray, window: int, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns the attention of each of the last `window` queries to every token: [min(window, n), T] float64.

    q: [n, d] the last n queries of one query head; k: [T, d] of its KV head; bias: [T] added to its logits.
    Each row has sum 1, and 0 for tokens after the query.
    """
    n_tokens, size = k.shape
    rows = min(window, len(q))
    logits = (q[len(q) - rows :].astype(np.float64) @ k.astype(np.float64).T) / np.sqrt(size) + bias
    query = np.arange(n_tokens - rows, n_tokens)[:, None]
    logits[np.arange(n_tokens)[None, :] > query] = -np.inf
    return softmax(logits)


def window_attention(q: np.ndarray, k: np.ndarray, window: int, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns the mean attention of the last `window` queries to every token, [T] float64. See window_weights()."""
    return window_weights(q, k, window, bias).mean(axis=0)


def pool(x: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    """Pools x [n] with stride 1. At the ends, `avg` counts zeros and `max` ignores the missing entries."""
    half = kernel // 2
    if kind == "max":
        padded = np.pad(x, half, constant_values=-np.inf)
        return np.lib.stride_tricks.sliding_window_view(padded, kernel).max(axis=-1) if len(x) else x
    padded = np.pad(x, half)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel).sum(axis=-1) / kernel if len(x) else x


def pooled_attention(layer: Layer, window: int, kernel: int, kind: str, gqa: str = "mean") -> np.ndarray:
    """Returns [Hkv, T] float64: window attention, reduced over the query heads of a KV head by `gqa`, pooled by `kind`.

    Tokens inside the window keep their unpooled attention.
    """
    n_heads = layer.q.shape[0]
    n_heads_kv, n_tokens, _ = layer.k.shape
    group = n_heads // n_heads_kv
    bias = np.zeros(layer.k.shape[:2]) if layer.bias is None else layer.bias
    of = [h // group for h in range(n_heads)]
    attention = [window_attention(layer.q[h], layer.k[of[h]], window, bias[of[h]]) for h in range(n_heads)]
    grouped = np.stack(attention).reshape(n_heads_kv, group, n_tokens)
    out = grouped.max(axis=1) if gqa == "max" else grouped.mean(axis=1)
    before = max(0, n_tokens - window)
    for row in out:
        row[:before] = pool(row[:before], kernel, kind)
    return out
