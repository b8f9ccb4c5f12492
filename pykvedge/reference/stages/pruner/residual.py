"""Residual: repeatedly keeps the row that is farthest from the image's mean and from all kept rows.

The mean stands for the background, so rows that stand out come first. The distance to kept rows avoids two similar
rows. The distance uses lengths, not only directions: a row close to the background is near, whatever its direction.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import ImageRows, Settings


def prune(image: ImageRows, n: int, settings: Settings) -> np.ndarray:
    """Returns [n] int64, ascending: rows by squared distance to the mean and to kept rows; ties: the first."""
    rows = image.rows.astype(np.float64)
    away = ((rows - rows.mean(axis=0)) ** 2).sum(axis=1)
    kept: list[int] = []
    while len(kept) < n:
        kept.append(int(np.argmax(away)))
        away = np.minimum(away, ((rows - rows[kept[-1]]) ** 2).sum(axis=1))
        away[kept] = -1.0
    return np.sort(np.array(kept))


SUMMARY = "rows that stand out, and differ from the rows already kept"
SOURCE = "kvedge's own"
