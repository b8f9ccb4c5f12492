"""Expected attention: the score of a token is the attention that future queries are expected to pay to it.

Devoto et al. 2025 (arXiv:2510.00636), section 3. The queries of a head, without rotation by position, are modelled as a
normal distribution with the mean and the covariance of the prompt's queries. The mean rotation of the next `n_future`
positions is applied to the model. The model gives the expected exponential of each key's logit; a key's share of the
sum is the expected attention. The expected attention is averaged over the query heads of a KV head. Then it is
multiplied by the norm of the value, as in the released code (kvpress); the paper takes the norm of the value's
contribution to the residual stream. The first `n_sink` tokens stay; their queries are unlike all others and are left
out. The released code rotates the covariance by the mean rotation too, which ignores the spread of the rotated means.
It adds `eps` to each share: 0 by default, 0.01 in its measurements. No question is read, so a text can be compressed
before its question is known. The paper protects no last tokens; here `recent` = auto keeps 32 last tokens, because the
end of a prompt says what to do. --recent 0 is the paper's form.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import softmax
from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.rotation import Rotation


def statistics(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean [d] and the covariance [d, d] (divided by n) of the queries [n, d] of one head."""
    mean = queries.mean(axis=0)
    away = queries - mean
    return mean, away.T @ away / len(queries)


def expected_attention(
    mean: np.ndarray, covariance: np.ndarray, keys: np.ndarray, bias: np.ndarray | float = 0.0
) -> np.ndarray:
    """Returns [n]: each key's share of the expected exponentials of logits. keys: [n, d].

    The queries have the given mean [d] and covariance [d, d]. bias: [n] added to the logits of merged rows.
    """
    size = keys.shape[-1]
    logits = keys @ mean / np.sqrt(size) + np.einsum("td,de,te->t", keys, covariance, keys) / (2 * size) + bias
    return softmax(logits)


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: expected attention times the norm of the value; the first tokens rank above all."""
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


SUMMARY = "attention expected from future queries, times the norm of the value"
SOURCE = "Devoto et al. 2025, section 3"
