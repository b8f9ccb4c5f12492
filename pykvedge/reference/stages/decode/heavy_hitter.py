"""Heavy hitters: the size after the prompt stays constant; the older row with the least attention is dropped.

H2O (Zhang et al. 2023), section 4. Scores start as the column sums of the prompt, whatever scorer chose the rows. Each
new token adds its attention to all rows, itself included, averaged over the query heads of the group. After each token
the lowest score outside the `recent` last rows is dropped, so N heavy hitters and M recent rows remain. If scores are
equal, the older row stays.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import DecodeState, Settings


def evict(state: DecodeState, settings: Settings) -> int | None:
    """Returns the row to drop, or None if the head has not grown."""
    if state.length <= state.kept or state.scores is None:
        return None
    asked = settings["recent"] or state.recent or state.kept // 2
    recent = max(1, min(asked, state.kept))
    sinks = max(0, min(state.sinks, state.kept - recent))
    older = state.scores[sinks : state.length - recent]
    if not len(older):
        return None
    return sinks + int(np.flatnonzero(older == older.min())[-1])


SUMMARY = "constant size: each new token replaces the token that received least attention"
SOURCE = "H2O, section 4"
