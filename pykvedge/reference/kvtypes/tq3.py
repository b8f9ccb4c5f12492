"""tq3: blocks of a scale in half precision and codes of 3 bits; each code stands for a level; x = scale * level.

After TurboQuant (Zandieh et al. 2025, arXiv:2504.19874, Algorithm 1): numbers of a rotated row are nearly normal. A
normal number is best rounded to 0.2451, 0.7560, 1.3439 and 2.1520 times its standard deviation, with its sign (Max
1960, table I). LEVELS are these numbers as integers, for a standard deviation of 12. In the paper, the norm of a row is
its scale. Here each block of 32 has a scale: the candidate with the least squared error.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.kvtypes import Definition

LEVELS = np.array([3, 9, 16, 26], np.float32)
DEVIATION = np.float32(12)
ENDS = (LEVELS[1:] + LEVELS[:-1]) / 2  # limits between levels; a larger number belongs to the next level


def rounded(groups: np.ndarray) -> np.ndarray:
    """Returns each number as its level times the scale with the least squared error; ties: the first scale.

    Starts: the root mean square, and the scales that map the largest number to one of the three largest levels (so
    rounding twice changes nothing). Each start gives way to the least-squares scale of its levels, in half precision.
    Sums are in float64, products with ENDS in float32.
    """
    size = np.abs(groups)
    root = np.sqrt((size.astype(np.float64) ** 2).mean(axis=-1, keepdims=True)).astype(np.float32)
    top = size.max(axis=-1, keepdims=True)
    found = [_fitted(size, start) for start in (root / DEVIATION, *(top / level for level in LEVELS[:0:-1]))]
    best = np.argmin([((size.astype(np.float64) - rows) ** 2).sum(axis=-1, keepdims=True) for rows in found], axis=0)
    out = np.choose(best, found)
    return np.where(groups > 0, out, -out)


def _fitted(size: np.ndarray, start: np.ndarray) -> np.ndarray:
    levels = _nearest(size, start).astype(np.float64)
    fitted = (size * levels).sum(axis=-1, keepdims=True) / (levels * levels).sum(axis=-1, keepdims=True)
    scale = fitted.astype(np.float32).astype(np.float16).astype(np.float32)
    return scale * _nearest(size, scale)


def _nearest(size: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return LEVELS[(size[..., None] > scale[..., None] * ENDS).sum(axis=-1)]


TYPE = Definition(rounded, levels=2)
