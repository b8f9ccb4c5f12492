"""Window attention: the tokens that the prompt's last queries look at are the tokens that the answer needs.

SnapKV (Li et al. 2024, arXiv:2404.14469), section 4: attention of the last W queries (the observation window),
averaged over these queries and pooled along the tokens, so neighbours stay together. The window is kept, up to half of
the budget; the paper uses budgets of at least two windows and leaves smaller budgets open. The older tokens of a longer
window compete like other tokens. Before pooling, the attention is reduced over the query heads of a KV head.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.window import pooled_attention


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64. Tokens inside the window keep their unpooled attention."""
    return pooled_attention(layer, settings["window"], settings["kernel"], settings["pool"], settings["gqa"])


SUMMARY = "attention from the last queries of the prompt, pooled over neighbours"
SOURCE = "SnapKV, section 4"
