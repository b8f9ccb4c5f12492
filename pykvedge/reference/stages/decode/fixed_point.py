"""Fixed-point elimination: the cache keeps its share of all tokens so far; a row too many goes from one fixed place.

Elastic Cache (Liu et al. 2024), section 3.3. The released code computes the place once, 25 rows before the end of the
compressed prompt, and that is what produced the published figures: the newest rows of the prompt, and then what was
generated, slide over it. New tokens keep their original positions here, which the released code does not do.
"""

from __future__ import annotations

from pykvedge.reference.stages.base import DecodeState, Settings
from pykvedge.reference.stages.elimination import row_by_share


def evict(state: DecodeState, settings: Settings) -> int | None:
    """The row to drop; the share is that of the budget."""
    return row_by_share(state, state.budget / state.prompt, settings)


SUMMARY = "the budget's share of all tokens so far, rows dropped at one fixed place"
SOURCE = "Elastic Cache, section 3.3"
