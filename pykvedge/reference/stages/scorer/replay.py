"""Replay: a token matters as much as the query that needs it most looks at it.

KVzip (Kim et al. 2025, arXiv:2505.23416), section 3: after the prompt the model is asked to repeat it and reads it
again, and the score of a pair is the largest attention that any query of this second pass pays to it, over the queries
and the query heads of its KV head. What is needed to say the prompt again is what any question may need. The pass goes
in chunks, each of which is asked for by itself and begins where the prompt ends: the softmax of its queries runs over
the tokens of the chat template, the chunk's own and, causally, those of the pass. `scope` = context has all of the
prompt in it instead. The tokens of the template are kept before all others.

`projected` is KVzip+, as released code (kvpress) has it: what a query head pays a token counts times |v W_O|, the
length of what the value adds to the residual stream through that head's part of the output projection, and the largest
of these products is the score. That code also divides by the length of the hidden row that a query was made of, behind
the layer's norm, where it is nearly constant; it weighs queries against each other, and is left out here.

`source` says whose queries these are: of the prompt repeated (`repeat`, the paper's), of a fixed instruction that is
read after the prompt (`instruction`, one short pass), or the prompt's own (`prompt`, no pass), where each query sees
what is before it. Nothing else is protected.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import causal_attention, softmax
from pykvedge.reference.stages.base import Layer, Settings

KEPT_FIRST = 2.0  # above any attention
PROJECTED_FIRST = 1e18  # above any attention times any length of a value


def replayed_attention(q: np.ndarray, context: np.ndarray, own: np.ndarray) -> np.ndarray:
    """[n, m]: what queries [n, d] pay to keys [m, d] before them, and to their own [n, d] up to each of them."""
    logits = q.astype(np.float64) @ np.concatenate([context, own]).astype(np.float64).T / np.sqrt(q.shape[-1])
    later = np.triu_indices(len(own), k=1)
    logits[later[0], len(context) + later[1]] = -np.inf
    return softmax(logits)[:, : len(context)]


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: the largest attention paid to each token."""
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
    """[H, T] float64: |v_t W_O[h]| of each query head h where `projected` asks for it, else ones."""
    n_heads, n_tokens = len(layer.q), layer.k.shape[1]
    if not settings["projected"] or layer.projection is None:
        return np.ones((n_heads, n_tokens))
    group = n_heads // len(layer.k)
    v, projection = layer.v.astype(np.float64), layer.projection.astype(np.float64)
    return np.stack([np.linalg.norm(v[h // group] @ projection[h], axis=1) for h in range(n_heads)])


SUMMARY = "the largest attention of any query, the prompt's own or of a second pass over it"
SOURCE = "KVzip (Kim et al. 2025), section 3"
