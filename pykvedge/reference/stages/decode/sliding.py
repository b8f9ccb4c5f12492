"""Sliding window: the size after the prompt stays constant; every new token drops the row after the sinks.

StreamingLLM (Xiao et al. 2024), section 3.2. Positions keep counting; in the paper they are places in the cache.
"""

from __future__ import annotations

from pykvedge.reference.stages.base import DecodeState, Settings


def evict(state: DecodeState, settings: Settings) -> int | None:
    """Returns the row after the sinks, or None if the head has not grown."""
    return state.sinks if state.length > state.kept else None


SUMMARY = "constant size: each new token replaces the oldest token after the sinks"
SOURCE = "StreamingLLM, section 3.2"
