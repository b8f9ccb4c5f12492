"""The critical rule: a part of the budget is chosen by how much a value adds to the layer's output.

CriticalKV (Feng et al. 2025, arXiv:2502.03805), algorithm 1. The eviction of a pair changes the output of an attention
layer by at most the attention of the pair times the norm of its value after the output projection W_O. The first half
of a head's budget goes to the tokens with the largest scores. The rest goes to the tokens with the largest
(score + eps) * weight. The weight is that norm, averaged over the query heads of a KV head. The paper bounds the L1
change: `l1`. The Euclidean norm, `l2`, gives nearly the same order and costs d_v^2 instead of d_v D per value, by the
Gram matrix W_O W_O' of each head. The released code (kvpress) raises the window above all scores, so protected tokens
fill the first half: half = budget. half = free halves the budget that protection leaves.

Scores must be attention alone. Scorer.attends says whether a scorer's scores are attention alone.
"""

from __future__ import annotations

import numpy as np

EPS = 1e-4  # the value in the released code


def value_weights(v: np.ndarray, projection: np.ndarray, norm: str) -> np.ndarray:
    """Returns [Hkv, T] float64: the norm of v_t W_O[h], averaged over the query heads of a KV head.

    v: [Hkv, T, d_v]; projection: [H, d_v, D].
    """
    group, order = len(projection) // len(v), 1 if norm == "l1" else 2
    v, projection = v.astype(np.float64), projection.astype(np.float64)
    out = np.zeros(v.shape[:2])
    for h, w in enumerate(projection):
        out[h // group] += np.linalg.norm(v[h // group] @ w, ord=order, axis=1) / group
    return out


def weighed(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the weighted scores [T] float64 for the second step of the critical rule."""
    return (scores + EPS) * weights


def first_half(half: str, kept: int, protected: int) -> int:
    """Returns how many unprotected tokens the first step chooses, for a head that keeps `kept` tokens."""
    return (kept - protected) // 2 if half == "free" else max(0, kept // 2 - protected)
