"""Weighted merge: evicted rows count by how similar their key is to the kept key.

LOOK-M (Wan et al. 2024), eq. 12: k_j <- (k_j + sum_i w_i k_i) / (L_j + 1), w_i = cos(k_i, k_j). Negative similarities
are used as they are, or with `clamp` as 0. The released code merges only what is at least as similar as the mean and
drops the rest: `sim_filter`. It compares the mean over the heads of their i-th evicted tokens, which are different
tokens; here every head has its own mean.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import assign, merge


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Merged keys and values, [n, d] float64 each, and with bias = mass [n] biases."""
    to = assign(head)
    if settings["sim_filter"]:
        to = to.above_mean()
    weight = np.maximum(to.weight, 0)[:, None] if settings["clamp"] else to.weight[:, None]
    return merge(head, to, settings, lambda rows: weight * rows[to.source])


SUMMARY = "merge evicted pairs weighted by the similarity of their keys"
SOURCE = "LOOK-M, eq. 12"
