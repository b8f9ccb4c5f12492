"""Pivotal merge: each evicted row is first averaged with its pivot, the kept row, so that the pivot weighs more.

LOOK-M (Wan et al. 2024), eq. 11: k_j <- (k_j + sum_i (k_i + k_j) / 2) / (L_j + 1), all right-hand sides with the
original k_j. The kept row ends with the weight (1 + L_j / 2) / (L_j + 1), never below one half.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import assign, merge


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Returns merged keys and values, [n, d] float64 each; with bias = mass also biases [n]."""
    to = assign(head)
    return merge(head, to, settings, lambda rows: (rows[to.source].astype(np.float64) + rows[head.kept[to.target]]) / 2)


SUMMARY = "like averaged, but the kept pair keeps at least half of the weight"
SOURCE = "LOOK-M, eq. 11"
