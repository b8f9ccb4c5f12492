"""Keep all: generated tokens are appended and nothing is evicted while decoding (LOOK-M, section 3.2)."""

from __future__ import annotations

import numpy as np

from pykvedge.stages.base import DecodePolicy, Settings


def evict(length: int, generated: int, settings: Settings) -> np.ndarray:
    """No slot is dropped, whatever the length."""
    return np.zeros(0, dtype=np.int64)


MEMBER = DecodePolicy(
    name="keep-all",
    summary="generated tokens are all kept",
    source="LOOK-M, section 3.2",
    evict=evict,
)
