"""Window attention: what the prompt's last queries look at is what the answer will need.

SnapKV (Li et al. 2024, arXiv:2404.14469), section 4: attention of the last W queries (the observation window),
averaged over them, smoothed by pooling along the tokens so that neighbours stay together. The window is kept, as far as
that is at most half of the budget: the paper has budgets of at least two windows and does not say what becomes of
smaller ones. The window's older tokens then compete like the others. With grouped queries the attention is reduced over
the query heads of a KV head before pooling.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.window import pooled_attention


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64. The window's own tokens keep their unpooled attention."""
    return pooled_attention(layer, settings["window"], settings["kernel"], settings["pool"], settings["gqa"])


SUMMARY = "attention from the last queries of the prompt, pooled over neighbours"
SOURCE = "SnapKV, section 4"
