"""Elimination at a fixed place, which two decode policies share."""

from __future__ import annotations

import math

from pykvedge.stages.base import DecodeState, Param

DISTANCE = Param("distance", 25, "rows between the fixed place and the end of the compressed prompt", low=1, high=2**20)


def row_by_share(state: DecodeState, share: float, distance: int) -> int | None:
    """The row to drop so that a head holds `share` of all tokens so far, at most one a token; None: none.

    It is always the same row: `distance` before the end of the compressed prompt, or the middle one where that leaves
    nothing before it.
    """
    if math.floor(state.length - (state.prompt + state.generated) * share + 1e-9) <= 0:
        return None
    row = state.kept - distance
    return row if row >= max(state.sinks, 1) else max(state.sinks, state.kept // 2)
