"""Evict: evicted rows are dropped, and kept rows do not change."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and values of the kept tokens, [n, d] float64 each."""
    return head.k[head.kept].astype(np.float64), head.v[head.kept].astype(np.float64)


SUMMARY = "drop all other pairs"
SOURCE = "H2O; StreamingLLM"
