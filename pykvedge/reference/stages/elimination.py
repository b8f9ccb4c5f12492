"""Elimination at a fixed place, which two decode policies share."""

from __future__ import annotations

import math

from pykvedge.reference.stages.base import DecodeState, Settings


def row_by_share(state: DecodeState, share: float, settings: Settings) -> int | None:
    """The row to drop so that a head holds `share` of all tokens so far, at most one a token; None: none.

    It is always the same row, as in the released codes: `distance` before the end of the compressed prompt, or the
    middle one where that leaves nothing before it. The papers can be read to mean a distance to the newest row instead,
    which `relative` is.
    """
    if math.floor(state.length - (state.prompt + state.generated) * share + 1e-9) <= 0:
        return None
    end = state.length if settings["relative"] else state.kept
    row = end - settings["distance"]
    return row if row >= max(state.sinks, 1) else max(state.sinks, end // 2)
