"""Cumulative attention: a token matters as much as all queries together looked at it.

H2O (Zhang et al. 2023), section 4: the score of a token is the sum of its column in the attention matrix. LOOK-M
(Wan et al. 2024), eq. 4, uses the same sum. Early tokens are seen by more queries and gain from it; that is the method,
so nothing is normalised. With grouped queries the sums of the g query heads that share a KV head are averaged. Elastic
Cache (Liu et al. 2024), eq. 1, and PrefixKV (Wang et al. 2024), section 3.1, take one importance per layer for all its
heads: `share` set to layer.
"""

from __future__ import annotations

import numpy as np

from pykvedge.stages.base import Layer, Param, Scorer, Settings


def column_sums(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """s[n] = sum over queries m >= n of softmax(q_m . k_n / sqrt(d)).

    q, k: [T, d] of one query head and its KV head. Returns [T] float64.
    """
    n_tokens, size = k.shape
    logits = (q.astype(np.float64) @ k.astype(np.float64).T) / np.sqrt(size)
    logits[np.triu_indices(n_tokens, k=1)] = -np.inf
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights.sum(axis=0)


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: column sums, averaged over the query heads of each KV head, or over all heads of the layer."""
    n_heads, n_tokens, _ = layer.q.shape
    n_heads_kv = layer.k.shape[0]
    group = n_heads // n_heads_kv
    sums = np.stack([column_sums(layer.q[h], layer.k[h // group]) for h in range(n_heads)])
    out = sums.reshape(n_heads_kv, group, n_tokens).mean(axis=1)
    return np.tile(out.mean(axis=0), (n_heads_kv, 1)) if settings["share"] == "layer" else out


MEMBER = Scorer(
    name="cumulative",
    summary="attention that a token received, summed over all queries of the prompt",
    source="H2O, section 4; LOOK-M, eq. 4",
    score=score,
    params=(
        Param(
            "window",
            0,
            "last tokens that are kept; 0: half of the budget, as in H2O",
            low=0,
            high=2**20,
        ),
        Param("share", "head", "one score per KV head, or one for all heads of a layer", choices=("head", "layer")),
    ),
    auto_recent=lambda budget, settings: min(budget, settings["window"]) if settings["window"] else budget // 2,
)
