"""A low-pass filter along the tokens, for keys and values. The scorers dct and modal and the allocator spectral use it.

FlashCache (Yang et al. 2025, arXiv:2511.16786), section 3.2: the orthonormal DCT-II of every channel along the tokens.
The bins below a cut-off form the base; the other bins form the deviation from the base.
"""

from __future__ import annotations

import numpy as np


def cutoff(gamma: float, n_tokens: int) -> int:
    """Returns the number of bins that form the base: floor(gamma * T), at least 1 and at most T."""
    return min(n_tokens, max(1, int(np.floor(gamma * n_tokens + 1e-9))))


def cosines(first: int, end: int, n_tokens: int) -> np.ndarray:
    """Returns rows first <= m < end, first >= 1, of the orthonormal DCT-II: [end - first, T] float64."""
    phase = np.arange(first, end)[:, None] * (2 * np.arange(n_tokens) + 1)[None, :] % (4 * n_tokens)
    return np.sqrt(2 / n_tokens) * np.cos(np.pi / (2 * n_tokens) * phase)


def deviation(x: np.ndarray, gamma: float) -> np.ndarray:
    """Returns x [..., T, d] minus its base, float64.

    The mean (bin 0) is subtracted first, so a constant x gives exact zeros.
    """
    x = x.astype(np.float64)
    n_tokens = x.shape[-2]
    w = cutoff(gamma, n_tokens)
    if w == n_tokens:
        return np.zeros_like(x)
    rows = cosines(1, w, n_tokens)
    x = x - x.mean(axis=-2, keepdims=True)
    return x - rows.T @ (rows @ x)


def outliers(k: np.ndarray, v: np.ndarray, gamma: float) -> np.ndarray:
    """Eq. 10, "outlier KV": [..., T] float64, from keys k [..., T, d] and values v [..., T, d_v].

    The squared deviation of the key plus the squared deviation of the value, each averaged over the channels.
    """
    return (deviation(k, gamma) ** 2).mean(axis=-1) + (deviation(v, gamma) ** 2).mean(axis=-1)


def high_share(x: np.ndarray, gamma: float) -> float:
    """Returns the share of the energy of x [..., T, d] in the deviation; 0 if x has no energy.

    The transform is orthonormal: the energy of bins equals the energy of the rows that they form.
    """
    total = float((x.astype(np.float64) ** 2).sum())
    return float((deviation(x, gamma) ** 2).sum()) / total if total > 0 else 0.0
