"""Mean attention: the score of a token is its mean attention over the queries that see the token.

RoCo (Ren & Zhu 2024, arXiv:2402.06262): the sum of a token's column in the attention matrix, divided by the number of
queries that see the token. Early tokens then gain nothing from more queries. Tokens whose attention varies the most are
kept whatever their mean, because a mean of varying numbers is the least reliable. With grouped queries the attention is
averaged over the query heads of a KV head before it is squared.

The paper evicts one token after another; this is the form for a whole prompt. Among n kept tokens, max(1, n // 10) are
the last tokens, `spread` * n have the largest standard deviation, and the others have the largest mean. The paper keeps
the first four tokens too; in a plan, these are the sinks.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from pykvedge.reference.stages.attention import grouped_attention
from pykvedge.reference.stages.base import Layer, Settings


def moments(attention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and standard deviation of each column over the rows that see it: two [T] float64.

    attention: a causal attention matrix [T, T]. One query sees the last token, so its deviation is 0.
    """
    seen = len(attention) - np.arange(len(attention))
    mean = attention.sum(axis=0) / seen
    variance = (attention**2).sum(axis=0) / seen - mean**2
    return mean, np.sqrt(np.maximum(variance, 0))  # rounding can make a variance of zero negative


_KNOWN: WeakKeyDictionary[Layer, tuple[np.ndarray, np.ndarray]] = WeakKeyDictionary()


def _moments(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Returns means and deviations of all KV heads, [Hkv, T] each. Cached, because both scores need both."""
    if layer not in _KNOWN:
        heads = [moments(grouped_attention(layer, h)) for h in range(len(layer.k))]
        _KNOWN[layer] = np.stack([mean for mean, _ in heads]), np.stack([deviation for _, deviation in heads])
    return _KNOWN[layer]


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: mean attention per query that sees the token."""
    return _moments(layer)[0]


def deviation(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: standard deviation of the attention over the queries that see the token."""
    return _moments(layer)[1]


SUMMARY = "mean attention of the queries that saw the token, and its variation"
SOURCE = "RoCo"
reserve = deviation
