"""Ratio-keeping elimination: as fixed-point, each head with the share that it was granted of the prompt.

PrefixKV (Wang et al. 2024), section 3.1: layers keep different shares of the prompt, and go on doing so.
"""

from __future__ import annotations

from pykvedge.reference.stages.base import DecodeState, Settings
from pykvedge.reference.stages.elimination import row_by_share


def evict(state: DecodeState, settings: Settings) -> int | None:
    """The row to drop; the share is what the head kept of the prompt."""
    return row_by_share(state, state.kept / state.prompt, settings)


SUMMARY = "each head's share of all tokens so far, rows dropped at one fixed place"
SOURCE = "PrefixKV, section 3.1"
