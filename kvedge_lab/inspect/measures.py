"""Figures of one layer from its keys, values and importance. Symbols: Hkv KV heads, T tokens, d head size."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.scorer.mixkv import directions, redundancy
from pykvedge.reference.stages.spectrum import high_share


def head_redundancy(k: np.ndarray) -> np.ndarray:
    """Returns [Hkv] float64: mean cosine similarity of a head's keys (MixKV, eq. 4 and fig. 2). k: [Hkv, T, d]."""
    return np.array([redundancy(directions(head).mean(axis=0), len(head)) for head in k])


def power_spectrum(x: np.ndarray) -> np.ndarray:
    """Returns [T] float64: the energy of each bin of the orthonormal DCT-II along the tokens, over heads and channels.

    The sum is 1 (FlashCache, eq. 5 and fig. 1); all zeros for x = 0. x: [Hkv, T, d].
    """
    x = x.astype(np.float64)
    n = x.shape[1]
    # the DCT-II is the real part of the Fourier transform of rows and mirrored rows, shifted by half a step
    mirrored = np.concatenate([x, x[:, ::-1]], axis=1)
    turned = np.fft.rfft(mirrored, axis=1)[:, :n] * np.exp(-0.5j * np.pi * np.arange(n) / n)[None, :, None]
    bins = turned.real / np.sqrt(2 * n)
    bins[:, 0] /= np.sqrt(2)
    energy = (bins**2).sum(axis=(0, 2))
    total = energy.sum()
    return energy / total if total > 0 else energy


def outlier_ratio(k: np.ndarray, v: np.ndarray, gamma: float) -> float:
    """Returns R, 0 to 2: energy share above cut-off gamma, of keys plus of values (FlashCache, eq. 12, fig. 4)."""
    return high_share(k, gamma) + high_share(v, gamma)


def lorenz(importance: np.ndarray) -> np.ndarray:
    """Returns [T + 1] float64: the share of importance in the n most important tokens, n = 0 .. T (PrefixKV, fig. 2).

    importance: [T], 0 or more. If all are 0, the result is a straight line.
    """
    ordered = np.sort(np.maximum(importance.astype(np.float64), 0))[::-1]
    total = ordered.sum()
    if total == 0:
        return np.linspace(0, 1, len(ordered) + 1)
    return np.concatenate([[0.0], np.cumsum(ordered) / total])


def gini(importance: np.ndarray) -> float:
    """Returns the Gini coefficient, 0 (all tokens alike) to 1 (one token has everything): twice the area between lorenz
    and the diagonal.
    """
    curve = lorenz(importance)
    n = len(curve) - 1
    return float((curve[:-1] + curve[1:]).sum() / n - 1) if n else 0.0
