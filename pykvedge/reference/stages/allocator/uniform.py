"""Uniform: every layer and every KV head keeps the same number of pairs (H2O, LOOK-M, StreamingLLM)."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Prompt, Settings


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64, all equal to the budget."""
    n_layers, n_heads_kv, _ = prompt.scores.shape
    return np.full((n_layers, n_heads_kv), prompt.budget, dtype=np.int64)


SUMMARY = "the same number for every layer and KV head"
SOURCE = "H2O; LOOK-M; StreamingLLM"
