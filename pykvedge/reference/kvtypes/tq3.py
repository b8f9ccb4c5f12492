"""tq3: blocks of a scale in half precision and codes of 3 bits, each of which stands for a level; x = scale * level.

After TurboQuant (Zandieh et al. 2025, arXiv:2504.19874, Algorithm 1): numbers of a rotated row are nearly normal, and a
normal number is best rounded to 0.2451, 0.7560, 1.3439 and 2.1520 times its standard deviation, either sign (Max 1960,
table I). LEVELS are these in whole numbers, a standard deviation being 12. There the norm of a row is its scale; here a
block of 32 has one, of several the one with the least squared error.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.kvtypes import Definition

LEVELS = np.array([3, 9, 16, 26], np.float32)
DEVIATION = np.float32(12)
ENDS = (LEVELS[1:] + LEVELS[:-1]) / 2  # numbers beyond belong to the next level


def rounded(groups: np.ndarray) -> np.ndarray:
    """Levels of the scale that leaves the least squared error; of equals the first.

    Scales to begin with: of the root mean square, then those that make the largest size one of the three largest
    levels, so that what was rounded is rounded to itself. Each gives way to the one of least squares for the levels
    that it gives, in half precision. Sums are in float64, products with ENDS in float32.
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
