"""KeyDiff: keys matter if their direction differs from the other keys of their head.

Park et al. 2025 (arXiv:2504.15364), section 3: the anchor is the mean of a head's keys, each scaled to length 1. The
score of a token is minus the cosine of its key and the anchor. The scorer reads no query. The paper also tries a second
anchor, the mean of the unscaled keys (setting `anchor`). The paper protects no token; here `recent` = auto keeps the
last 32 tokens, because the end of a prompt says what to do. --recent 0 is the paper's form.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.scorer.mixkv import directions


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: -cos(k, anchor); 0 for a key or an anchor of length 0."""
    unit = directions(layer.k)
    anchor = (unit if settings["anchor"] == "unit" else layer.k.astype(np.float64)).mean(axis=1)
    return -np.einsum("htd,hd->ht", unit, directions(anchor))


SUMMARY = "keys that differ in direction from the other keys of their head"
SOURCE = "Park et al. 2025, section 3"
