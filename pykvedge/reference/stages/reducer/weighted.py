"""Weighted merge: an evicted row is weighted by the similarity of its key to the kept key.

LOOK-M (Wan et al. 2024), eq. 12: k_j <- (k_j + sum_i w_i k_i) / (L_j + 1), w_i = cos(k_i, k_j). Negative similarities
are used unchanged, or as 0 with `clamp`. The released code merges only rows whose similarity is at least the mean, and
drops the others: `sim_filter`. Its mean runs over the i-th evicted token of every head, although these are different
tokens; here every head uses the mean of its own tokens.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import assign, merge


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Returns merged keys and values, [n, d] float64 each; with bias = mass also biases [n]."""
    to = assign(head)
    if settings["sim_filter"]:
        to = to.above_mean()
    weight = np.maximum(to.weight, 0)[:, None] if settings["clamp"] else to.weight[:, None]
    return merge(head, to, settings, lambda rows: weight * rows[to.source])


SUMMARY = "merge evicted pairs weighted by the similarity of their keys"
SOURCE = "LOOK-M, eq. 12"
