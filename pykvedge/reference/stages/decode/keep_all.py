"""Keep all: generated tokens are appended and nothing is evicted while decoding (LOOK-M, section 3.2)."""

from __future__ import annotations

from pykvedge.reference.stages.base import DecodeState, Settings


def evict(state: DecodeState, settings: Settings) -> int | None:
    """Returns None: no row is dropped."""
    return None


SUMMARY = "keeps all generated tokens"
SOURCE = "LOOK-M, section 3.2"
