"""Replay: the score of a token is the largest attention of any query that reads the prompt a second time.

KVzip (Kim et al. 2025, arXiv:2505.23416), section 3. After the prompt, the model is asked to repeat the prompt and
reads it again. The score of a pair is the largest attention that a query of this second pass pays to the pair, over all
queries and all query heads of the KV head. A pair that the repetition needs may be needed by any question. The pass is
cut into chunks; each chunk has a separate request and starts at the end of the prompt. The softmax of a chunk's queries
runs over the tokens of the chat template, the chunk's tokens in the prompt and, causally, the chunk's tokens in the
pass. With `scope` = context it runs over the whole prompt instead. Tokens of the template are kept first.

`projected` is KVzip+ as in released code (kvpress): the attention of a query head to a token is multiplied by |v W_O|,
the norm of the value after that head's part of the output projection. The score is the largest product. The released
code also divides by the norm of the query's hidden row. Behind the layer's norm this number is nearly constant and
only weighs queries against each other, so the division is left out here.

`source` chooses the queries: `repeat` (the paper) repeats the prompt; `instruction` reads a fixed instruction after the
prompt, in one short pass; `prompt` takes the prompt's queries without a second pass, and each query sees the tokens
before it. The scorer protects no other tokens.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import causal_attention, softmax
from pykvedge.reference.stages.base import Layer, Settings

KEPT_FIRST = 2.0  # larger than any attention
PROJECTED_FIRST = 1e18  # larger than any attention times any norm of a value


def replayed_attention(q: np.ndarray, context: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns [n, m]: attention of queries [n, d] to keys `context` [m, d]; the softmax also covers `own` [n, d]."""
    logits = q.astype(np.float64) @ np.concatenate([context, own]).astype(np.float64).T / np.sqrt(q.shape[-1])
    later = np.triu_indices(len(own), k=1)
    logits[later[0], len(context) + later[1]] = -np.inf
    return softmax(logits)[:, : len(context)]


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: the largest attention paid to each token; with `projected`, times a value norm."""
    group, (n_heads_kv, n_tokens, _) = len(layer.q) // len(layer.k), layer.k.shape
    out = np.zeros((n_heads_kv, n_tokens))
    lengths = _lengths(layer, settings)
    if settings["source"] == "prompt" or layer.replay is None:
        for h, query_head in enumerate(layer.q):
            paid = causal_attention(query_head, layer.k[h // group]).max(axis=0) * lengths[h]
            out[h // group] = np.maximum(out[h // group], paid)
        return out
    sinks = 0
    for chunk, q, k in layer.replay.parts(layer.index):
        sinks = max(sinks, chunk.sinks)
        index = np.arange(n_tokens)
        within = (index >= chunk.first) & (index < chunk.last)
        scope = within | (index < chunk.sinks) if settings["scope"] == "chunk" else np.full(n_tokens, True)
        scored = within if settings["scope"] == "chunk" else scope
        for h, query_head in enumerate(q):
            paid = replayed_attention(query_head, layer.k[h // group, scope], k[h // group]).max(axis=0)
            weighed = (paid * lengths[h, scope])[scored[scope]]
            out[h // group, scored] = np.maximum(out[h // group, scored], weighed)
    out[:, :sinks] = PROJECTED_FIRST if settings["projected"] else KEPT_FIRST
    return out


def _lengths(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [H, T] float64: |v_t W_O[h]| of each query head h if `projected` is set, else ones."""
    n_heads, n_tokens = len(layer.q), layer.k.shape[1]
    if not settings["projected"] or layer.projection is None:
        return np.ones((n_heads, n_tokens))
    group = n_heads // len(layer.k)
    v, projection = layer.v.astype(np.float64), layer.projection.astype(np.float64)
    return np.stack([np.linalg.norm(v[h // group] @ projection[h], axis=1) for h in range(n_heads)])


SUMMARY = "the largest attention of any query of the prompt or of a second pass over the prompt"
SOURCE = "KVzip (Kim et al. 2025), section 3"
