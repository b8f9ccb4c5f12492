"""Position: the later a token, the more it matters, so that the last ones are kept.

StreamingLLM (Xiao et al. 2024), section 3.2: a few first tokens (attention sinks) and the most recent ones stay. The
sinks are a protection that every plan has; this scorer does the rest. Sinks outrank the window when the budget is
small.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: the index of the token."""
    n_heads_kv, n_tokens, _ = layer.k.shape
    return np.tile(np.arange(n_tokens, dtype=np.float64), (n_heads_kv, 1))


SUMMARY = "the most recent tokens win"
SOURCE = "StreamingLLM, section 3.2"
