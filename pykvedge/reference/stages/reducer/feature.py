"""Feature: each evicted row is averaged into the kept one with the most similar key.

PrefixKV (Wang et al. 2024), table 12, "Feature": similarity is the cosine of the keys. The arithmetic is that of
LOOK-M's averaged merge, under the name that PrefixKV gives it.
"""

from __future__ import annotations

from pykvedge.reference.stages.base import Reducer
from pykvedge.reference.stages.reducer.averaged import reduce

MEMBER = Reducer(
    name="feature",
    summary="average each evicted pair into the kept one with the most similar key",
    source="PrefixKV, table 12",
    reduce=reduce,
)
