"""Heavy hitters: the size stays what it was after the prompt; of the older rows, the one least attended to goes.

H2O (Zhang et al. 2023), section 4. Scores start as the column sums of the prompt, whatever scorer chose its rows, and
grow by what every new token pays, itself included, averaged over the query heads of the group. After each token the
lowest score outside the `recent` last rows goes, so that N heavy hitters and M recent rows remain. Of equal scores the
older row stays.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import DecodeState, Settings


def evict(state: DecodeState, settings: Settings) -> int | None:
    """The row to drop, once the head has grown."""
    if state.length <= state.kept or state.scores is None:
        return None
    asked = settings["recent"] or state.recent or state.kept // 2
    recent = max(1, min(asked, state.kept))
    sinks = max(0, min(state.sinks, state.kept - recent))
    older = state.scores[sinks : state.length - recent]
    if not len(older):
        return None
    return sinks + int(np.flatnonzero(older == older.min())[-1])


SUMMARY = "constant size: for every new token the one that received least attention goes"
SOURCE = "H2O, section 4"
