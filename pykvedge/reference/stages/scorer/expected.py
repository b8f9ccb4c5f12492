"""Expected attention: a token matters as much as queries that are yet to come are expected to look at it.

Devoto et al. 2025 (arXiv:2510.00636), section 3: the queries of a head, before their positions turn them, are taken to
be normally distributed, with the mean and the covariance of the prompt's own. Turned by the mean rotation of the next
`n_future` positions, they make the expected exponential of each key's logit, and its share of all is the attention to
expect. With grouped queries it is averaged over the query heads of a KV head, and then weighed by the length of the
value, as in the released code (kvpress); the paper takes the length of what the value adds to the residual stream. The
first `n_sink` tokens stay, and their queries, which are unlike all others, do not count. The released code turns the
covariance by the mean rotation as well, which leaves out how far the turned means spread, and adds `eps` to each share:
0 by default, 0.01 where it is measured. No question is looked at, so that what comes before one can be compressed
without it. The last tokens are not protected; here `recent` = auto keeps 32 of them, since the end of a prompt says
what is to be done, and --recent 0 is the paper's.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import softmax
from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.rotation import Rotation


def statistics(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [d] and covariance [d, d], over their number, of the queries [n, d] of one head."""
    mean = queries.mean(axis=0)
    away = queries - mean
    return mean, away.T @ away / len(queries)


def expected_attention(
    mean: np.ndarray, covariance: np.ndarray, keys: np.ndarray, bias: np.ndarray | float = 0.0
) -> np.ndarray:
    """[n]: share of each key [n, d] in the expected exponential of logits, of queries with that mean and covariance.

    bias: [n] of the logits of rows that stand for several.
    """
    size = keys.shape[-1]
    logits = keys @ mean / np.sqrt(size) + np.einsum("td,de,te->t", keys, covariance, keys) / (2 * size) + bias
    return softmax(logits)


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: expected attention times the length of the value; the first tokens above all others."""
    n_heads_kv, n_tokens, size = layer.k.shape
    n_sink, queries = settings["n_sink"], layer.q if layer.all_q is None else layer.all_q
    group, so_far = len(queries) // n_heads_kv, queries.shape[1]
    rotation = layer.rotation or Rotation()
    turn = rotation.mean(so_far, settings["n_future"], size)
    plain = rotation.back(queries[:, n_sink:], n_sink)
    tokens = np.tile(np.arange(n_tokens), (n_heads_kv, 1)) if layer.tokens is None else layer.tokens
    k, v = layer.k.astype(np.float64), layer.v.astype(np.float64)
    out = np.zeros((n_heads_kv, n_tokens))
    for h in range(n_heads_kv):
        free = tokens[h] >= n_sink
        for head in plain[h * group : (h + 1) * group] if free.any() else ():
            mean, covariance = statistics(head)
            spread = turn @ covariance @ turn.T * settings["covariance"]
            bias = 0.0 if layer.bias is None else layer.bias[h, free]
            out[h, free] += expected_attention(turn @ mean, spread, k[h, free], bias) / group
        if settings["vnorm"]:
            out[h] = (out[h] + settings["eps"]) * np.linalg.norm(v[h], axis=-1)
    sinks = tokens < n_sink
    out[sinks] = out[~sinks].max(initial=0.0) + 1
    return out


SUMMARY = "attention that queries yet to come are expected to pay, by the value's length"
SOURCE = "Devoto et al. 2025, section 3"
