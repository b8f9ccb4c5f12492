"""Ratio-keeping elimination: works as fixed-point, but each head keeps the share that it kept of the prompt.

PrefixKV (Wang et al. 2024), section 3.1: layers keep different shares of the prompt, and of the generated tokens.
"""

from __future__ import annotations

from pykvedge.reference.stages.base import DecodeState, Settings
from pykvedge.reference.stages.elimination import row_by_share


def evict(state: DecodeState, settings: Settings) -> int | None:
    """Returns the row to drop, or None. The head holds the share of all tokens that it kept of the prompt."""
    return row_by_share(state, state.kept / state.prompt, settings)


SUMMARY = "keeps each head's share of all tokens; drops rows at one fixed place"
SOURCE = "PrefixKV, section 3.1"
