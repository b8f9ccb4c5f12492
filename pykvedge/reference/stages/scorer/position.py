"""Position: the score of a token is its index, so the last tokens are kept.

StreamingLLM (Xiao et al. 2024), section 3.2: a few first tokens (attention sinks) and the most recent tokens stay. A
plan protects the sinks; this scorer keeps the recent tokens. If the budget is small, sinks are kept before the window.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: the index of the token."""
    n_heads_kv, n_tokens, _ = layer.k.shape
    return np.tile(np.arange(n_tokens, dtype=np.float64), (n_heads_kv, 1))


SUMMARY = "the most recent tokens win"
SOURCE = "StreamingLLM, section 3.2"
