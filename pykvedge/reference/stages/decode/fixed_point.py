"""Fixed-point elimination: the cache keeps its share of all tokens so far; extra rows are dropped at one fixed place.

Elastic Cache (Liu et al. 2024), section 3.3. The released code computes the place once, 25 rows before the end of the
compressed prompt; the published figures come from this code. Newer rows move up to the fixed place: first the newest
rows of the prompt, then generated rows. Here new tokens keep their original positions, unlike there.
"""

from __future__ import annotations

from pykvedge.reference.stages.base import DecodeState, Settings
from pykvedge.reference.stages.elimination import row_by_share


def evict(state: DecodeState, settings: Settings) -> int | None:
    """Returns the row to drop, or None. The head holds the budget's share of all tokens."""
    return row_by_share(state, state.budget / state.prompt, settings)


SUMMARY = "keeps the budget's share of all tokens; drops rows at one fixed place"
SOURCE = "Elastic Cache, section 3.3"
