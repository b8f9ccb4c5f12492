"""Evict: what is not kept is dropped, what is kept stays as it was."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the kept tokens, [n, d] float64 each for keys and values."""
    return head.k[head.kept].astype(np.float64), head.v[head.kept].astype(np.float64)


SUMMARY = "drop the others"
SOURCE = "H2O; StreamingLLM"
