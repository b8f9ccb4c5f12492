"""Averaged merge: a kept row becomes the mean of itself and the evicted rows that are most similar to it.

LOOK-M (Wan et al. 2024), eq. 10: k_j <- (k_j + sum_i k_i) / (L_j + 1), with L_j the number of rows merged into j.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import assign, means


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Returns merged keys and values, [n, d] float64 each; with bias = mass also biases [n]."""
    return means(head, assign(head), settings)


SUMMARY = "average each evicted pair into the most similar kept pair"
SOURCE = "LOOK-M, eq. 10"
