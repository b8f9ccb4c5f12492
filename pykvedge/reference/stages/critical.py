"""The critical rule: what attention leaves to choose is chosen by what a value adds to the layer's output.

CriticalKV (Feng et al. 2025, arXiv:2502.03805), algorithm 1: evicting a pair changes the output of an attention layer
by at most its attention times the norm of its value once the output projection W_O took it. So the first half of a
head's budget goes to the tokens with the largest scores, and the rest to those with the largest (score + eps) * weight,
where the weight is that norm, averaged over the query heads of a KV head. The paper bounds the L1 change, `l1`; the
Euclidean norm, `l2`, orders nearly all tokens alike and costs d_v^2 instead of d_v D for each value, by the Gram matrix
W_O W_O' of each head. The released code (kvpress) raises the window above all scores, so that protected tokens fill
the first half; half = budget does the same. half = free halves what protection leaves instead.

Scores have to be attention and nothing else: a scorer says whether its own are (Scorer.attends).
"""

from __future__ import annotations

import numpy as np

EPS = 1e-4  # the released code's


def value_weights(v: np.ndarray, projection: np.ndarray, norm: str) -> np.ndarray:
    """[Hkv, T] float64: norm of v_t W_O[h], mean over the query heads of a KV head.

    v: [Hkv, T, d_v]; projection: [H, d_v, D].
    """
    group, order = len(projection) // len(v), 1 if norm == "l1" else 2
    v, projection = v.astype(np.float64), projection.astype(np.float64)
    out = np.zeros(v.shape[:2])
    for h, w in enumerate(projection):
        out[h // group] += np.linalg.norm(v[h // group] @ w, ord=order, axis=1) / group
    return out


def weighed(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[T] float64: what the second step goes by."""
    return (scores + EPS) * weights


def first_half(half: str, kept: int, protected: int) -> int:
    """Counts the tokens that the first step chooses beside the protected ones, of a head that keeps `kept`."""
    return (kept - protected) // 2 if half == "free" else max(0, kept // 2 - protected)
