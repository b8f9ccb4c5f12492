"""Weighted merge: evicted rows count by how similar their key is to the kept key.

LOOK-M (Wan et al. 2024), eq. 12: k_j <- (k_j + sum_i w_i k_i) / (L_j + 1), w_i = cos(k_i, k_j). Negative similarities
are used as they are.
"""

from __future__ import annotations

import numpy as np

from pykvedge.stages.base import Head, Reducer, Settings
from pykvedge.stages.similarity import assign, merged


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Merged keys and values, [n, d] float64 each."""
    to = assign(head)
    weight = to.weight[:, None]
    return (
        merged(head.k, head.kept, to, weight * head.k[to.source]),
        merged(head.v, head.kept, to, weight * head.v[to.source]),
    )


MEMBER = Reducer(
    name="weighted",
    summary="merge evicted pairs weighted by the similarity of their keys",
    source="LOOK-M, eq. 12",
    reduce=reduce,
    merges=True,
)
