"""Cumulative attention: the score of a token is the attention that it receives from all queries of the prompt.

H2O (Zhang et al. 2023), section 4: the score of a token is the sum of its column in the attention matrix. LOOK-M
(Wan et al. 2024), eq. 4, uses this sum too. Early tokens are seen by more queries and gain from it. The papers do not
normalise, so this scorer does not. With grouped queries, the sums of the g query heads of a KV head are averaged.
Elastic Cache (Liu et al. 2024), eq. 1, and PrefixKV (Wang et al. 2024), section 3.1, take one importance per layer for
all heads: setting `share` = layer.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import grouped_attention
from pykvedge.reference.stages.base import Layer, Settings


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: column sums, averaged over the query heads of each KV head or of the layer."""
    n_heads_kv = len(layer.k)
    if layer.column_sums is not None:
        return layer.column_sums.astype(np.float64)
    out = np.stack([grouped_attention(layer, h).sum(axis=0) for h in range(n_heads_kv)])
    return np.tile(out.mean(axis=0), (n_heads_kv, 1)) if settings["share"] == "layer" else out


SUMMARY = "attention that a token received, summed over all queries of the prompt"
SOURCE = "H2O, section 4; LOOK-M, eq. 4"
