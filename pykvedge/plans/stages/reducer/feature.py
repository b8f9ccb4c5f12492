"""Feature: each evicted row is averaged into the kept one with the most similar key.

PrefixKV (Wang et al. 2024), table 12, "Feature": similarity is the cosine of the keys. The arithmetic is that of
LOOK-M's averaged merge, under the name that PrefixKV gives it.
"""

from __future__ import annotations

import numpy as np

from pykvedge.plans.stages.base import Head, Reducer, Settings
from pykvedge.plans.stages.similarity import assign, means


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Merged keys and values, [n, d] float64 each."""
    return means(head, assign(head))


MEMBER = Reducer(
    name="feature",
    summary="average each evicted pair into the kept one with the most similar key",
    source="PrefixKV, table 12",
    reduce=reduce,
    merges=True,
)
