"""DCT: tokens whose key and value stand out from a smooth curve through their neighbours matter.

FlashCache (Yang et al. 2025, arXiv:2511.16786), section 3.2: a low-pass filter along the tokens gives the base of keys
and values, and a token's score is its mean squared distance from that base (eq. 10, "outlier KV"). No query is looked
at. The paper has one score per layer and token; `share` can give every KV head its own. Nothing is protected by
itself, so the last tokens can go too; `recent` protects them.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.spectrum import outliers


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: squared deviation of key and value from their base, each averaged over the channels."""
    out = outliers(layer.k, layer.v, settings["gamma"])
    return np.tile(out.mean(axis=0), (len(out), 1)) if settings["share"] == "layer" else out


SUMMARY = "keys and values that stand out from a smooth curve through their neighbours"
SOURCE = "FlashCache, eq. 10"
