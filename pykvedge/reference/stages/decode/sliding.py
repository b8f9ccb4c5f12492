"""Sliding window: the size stays what it was after the prompt; for every new token the row after the sinks goes.

StreamingLLM (Xiao et al. 2024), section 3.2. Positions go on counting; the paper's are those inside the cache.
"""

from __future__ import annotations

from pykvedge.reference.stages.base import DecodeState, Settings


def evict(state: DecodeState, settings: Settings) -> int | None:
    """The row after the sinks, once the head has grown."""
    return state.sinks if state.length > state.kept else None


SUMMARY = "constant size: for every new token the oldest one after the sinks goes"
SOURCE = "StreamingLLM, section 3.2"
