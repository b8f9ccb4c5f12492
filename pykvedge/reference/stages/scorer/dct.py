"""DCT: tokens matter if their key and value differ from a smooth curve through their neighbours.

FlashCache (Yang et al. 2025, arXiv:2511.16786), section 3.2: a low-pass filter along the tokens gives the base of keys
and values. The score of a token is its mean squared distance from the base (eq. 10, "outlier KV"). The scorer reads no
query. The paper has one score per layer and token; setting `share` can give every KV head a separate score. The scorer
protects no token by itself; `recent` protects the last tokens.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.spectrum import outliers


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: squared deviation of key and value from their base, averaged over the channels."""
    out = outliers(layer.k, layer.v, settings["gamma"])
    return np.tile(out.mean(axis=0), (len(out), 1)) if settings["share"] == "layer" else out


SUMMARY = "keys and values that stand out from a smooth curve through their neighbours"
SOURCE = "FlashCache, eq. 10"
