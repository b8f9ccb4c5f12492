"""Mean attention: a token matters as much as the average query that could see it looked at it.

RoCo (Ren & Zhu 2024, arXiv:2402.06262): the sum of a token's column in the attention matrix over the number
of queries that saw it, so that early tokens gain nothing from being seen by more. The tokens whose attention varies
the most are kept whatever their mean, because an eviction by the mean alone is the least reliable there. With grouped
queries the attention is averaged over the query heads of a KV head before it is squared.

The paper evicts one token after another; this is the form for a whole prompt: of n kept tokens max(1, n // 10) are the
last ones, `spread` * n those with the largest standard deviation, and the others those with the largest mean. Its first
four tokens are the sinks that every plan has.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from pykvedge.reference.stages.attention import grouped_attention
from pykvedge.reference.stages.base import Layer, Settings


def moments(attention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each column of a causal attention matrix [T, T] over the rows that see it.

    Two [T] float64. The last token is seen by one query and varies by 0.
    """
    seen = len(attention) - np.arange(len(attention))
    mean = attention.sum(axis=0) / seen
    variance = (attention**2).sum(axis=0) / seen - mean**2
    return mean, np.sqrt(np.maximum(variance, 0))  # rounding makes a variance of nothing negative


_KNOWN: WeakKeyDictionary[Layer, tuple[np.ndarray, np.ndarray]] = WeakKeyDictionary()


def _moments(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Means and deviations of all KV heads, [Hkv, T] each; computed once, as both scores ask for them."""
    if layer not in _KNOWN:
        heads = [moments(grouped_attention(layer, h)) for h in range(len(layer.k))]
        _KNOWN[layer] = np.stack([mean for mean, _ in heads]), np.stack([deviation for _, deviation in heads])
    return _KNOWN[layer]


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: mean attention per query that saw the token."""
    return _moments(layer)[0]


def deviation(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: standard deviation of the attention over the queries that saw the token."""
    return _moments(layer)[1]


SUMMARY = "attention per query that saw the token, and what varies the most"
SOURCE = "RoCo"
reserve = deviation
