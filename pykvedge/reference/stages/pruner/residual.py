"""Residual: always the row that is farthest from all that the model has read.

At first that is the image's mean, which stands for its background, so that what stands out comes first; then the rows
that are kept as well, so that no two of them say the same. Lengths count, not directions alone: a row that is hardly
more than the background is not far from it, whatever its direction.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import ImageRows, Settings


def prune(image: ImageRows, n: int, settings: Settings) -> np.ndarray:
    """[n] int64, ascending: by the squared distance to the nearest of the mean and the kept rows; ties: the first."""
    rows = image.rows.astype(np.float64)
    away = ((rows - rows.mean(axis=0)) ** 2).sum(axis=1)
    kept: list[int] = []
    while len(kept) < n:
        kept.append(int(np.argmax(away)))
        away = np.minimum(away, ((rows - rows[kept[-1]]) ** 2).sum(axis=1))
        away[kept] = -1.0
    return np.sort(np.array(kept))


SUMMARY = "what stands out, and differs from what is kept"
SOURCE = "kvedge's own"
