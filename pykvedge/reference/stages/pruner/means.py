"""Means: rows that are alike become their mean, around rows that differ from each other the most."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import ImageRows, Pruner, Settings
from pykvedge.reference.stages.pruner import maxmin


def merge(image: ImageRows, kept: np.ndarray, settings: Settings) -> np.ndarray:
    """[n, D] float64: the mean of each kept row and those that are more like it than like any other kept one."""
    unit, rows = image.unit(), image.rows.astype(np.float64)
    nearest = np.argmax(unit @ unit[kept].T, axis=1)
    nearest[kept] = np.arange(len(kept))
    return np.stack([rows[nearest == i].mean(axis=0) for i in range(len(kept))])


MEMBER = Pruner(
    name="means",
    summary="rows that are alike become one",
    source="maxmin's rows, as in VisionZip (Yang et al. 2024, arXiv:2412.04467) with means for sums",
    prune=maxmin.prune,
    merge=merge,
)
