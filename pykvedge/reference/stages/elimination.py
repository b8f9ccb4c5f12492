"""Drops rows at a fixed place. The decode policies fixed-point and ratio share this code."""

from __future__ import annotations

import math

from pykvedge.reference.stages.base import DecodeState, Settings


def row_by_share(state: DecodeState, share: float, settings: Settings) -> int | None:
    """Returns the row to drop so that a head holds `share` of all tokens so far; None: no row. At most one per token.

    The row has a fixed number, as in the released codes: `distance` before the end of the compressed prompt, or the
    middle row if `distance` reaches before the sinks. The papers can also mean a distance to the newest row:
    setting `relative`.
    """
    if math.floor(state.length - (state.prompt + state.generated) * share + 1e-9) <= 0:
        return None
    end = state.length if settings["relative"] else state.kept
    row = end - settings["distance"]
    return row if row >= max(state.sinks, 1) else max(state.sinks, end // 2)
