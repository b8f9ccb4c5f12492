"""KeyDiff: keys that point elsewhere than the others of their head matter.

Park et al. 2025 (arXiv:2504.15364), section 3: the anchor is the mean of a head's keys, each with length 1, and
the score of a token is minus the cosine of its key and the anchor. No query is looked at. The paper compares two
anchors: the mean of the keys as they are is the other (`anchor`). It protects nothing; here `recent` = auto keeps
the last 32 tokens, since the end of a prompt says what is to be done, and --recent 0 is the paper's.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: -cos(k, anchor); 0 for a key or an anchor of length 0."""
    k = layer.k.astype(np.float64)
    length = np.linalg.norm(k, axis=-1, keepdims=True)
    unit = np.divide(k, length, out=np.zeros_like(k), where=length > 0)
    anchor = (unit if settings["anchor"] == "unit" else k).mean(axis=1)
    size = np.linalg.norm(anchor, axis=-1, keepdims=True)
    direction = np.divide(anchor, size, out=np.zeros_like(anchor), where=size > 0)
    return -np.einsum("htd,hd->ht", unit, direction)


SUMMARY = "keys that point elsewhere than the others of their head"
SOURCE = "Park et al. 2025, section 3"
