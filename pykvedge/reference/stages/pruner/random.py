"""Random rows: a baseline that every pruner must beat."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import ImageRows, Settings
from pykvedge.reference.stages.scorer.random import mix


def prune(image: ImageRows, n: int, settings: Settings) -> np.ndarray:
    """Returns [n] int64: the rows i with the smallest mix(mix(seed) + i), ascending."""
    with np.errstate(over="ignore"):
        start = mix(np.array([settings["seed"]], dtype=np.uint64))
        drawn = mix(start + np.arange(len(image.rows), dtype=np.uint64))
    return np.sort(np.argsort(drawn, kind="stable")[:n])


SUMMARY = "random rows; the same for the same seed"
SOURCE = "a control"
