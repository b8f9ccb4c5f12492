"""Random scores: a baseline that every method must beat.

The score depends on the seed, the layer, the KV head and the token alone, so two runs agree.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele et al. 2014) of uint64 numbers."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64 in [0, 1), multiples of 2^-24: mix(mix(mix(mix(seed) + layer) + head) + token)."""
    n_heads_kv, n_tokens, _ = layer.k.shape
    with np.errstate(over="ignore"):
        start = mix(np.array([settings["seed"]], dtype=np.uint64))
        of_layer = mix(start + np.uint64(layer.index))
        of_head = mix(of_layer + np.arange(n_heads_kv, dtype=np.uint64))
        bits = mix(of_head[:, None] + np.arange(n_tokens, dtype=np.uint64)[None, :])
    return (bits >> np.uint64(40)).astype(np.float64) / 2**24


SUMMARY = "random scores; the same for the same seed"
SOURCE = "a control"
BY_PLACE = True
