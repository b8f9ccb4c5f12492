"""Streams in NumPy, the oracle for libkvedge's streams. A stream is read and compressed step by step.

A step works as engine.run, on other arrays: the rows that each KV head still holds, then the new rows. Two things stay
from earlier steps, because the rows of earlier queries may be gone: the column sums of the held rows, to which new
queries add their attention, and the queries of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pykvedge.plans import registry
from pykvedge.plans.plan import Plan
from pykvedge.reference.engine import Arrays, protection, reduced, select
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages import critical
from pykvedge.reference.stages.attention import softmax
from pykvedge.reference.stages.base import Head, Layer, ProfileTable, Result
from pykvedge.reference.storage import round_to


@dataclass
class _Held:
    """The rows of one KV head: tokens [n] int32, k and v [n, d] float32, sums [n] float64, bias [n] float32."""

    tokens: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sums: np.ndarray
    bias: np.ndarray

    def append(self, tokens: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens, tokens])
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        self.sums = np.concatenate([self.sums, np.zeros(len(tokens))])
        self.bias = np.concatenate([self.bias, np.zeros(len(tokens), np.float32)])

    def attend(self, q: np.ndarray) -> None:
        """Adds the attention of queries q [g, n, d] of the last n rows to `sums`, averaged over the g query heads."""
        logits = q.astype(np.float64) @ self.k.astype(np.float64).T / np.sqrt(q.shape[-1]) + self.bias
        n = q.shape[1]
        logits[:, :, len(self.k) - n :][:, ~np.tri(n, dtype=bool)] = -np.inf
        self.sums = self.sums + softmax(logits).mean(axis=0).sum(axis=0)


def run(
    plan: Plan, arrays: Arrays, kv_type: KvType | str, step: int, profiles: Mapping[str, ProfileTable] | None = None
) -> Result:
    """Returns what the plan keeps of a stream that is read and compressed `step` tokens at a time. `scores` is empty.

    profiles: stage name -> table, for the stages that need one.
    """
    kv_type = KvType.parse(kv_type)
    k, v = round_to(arrays.k, kv_type.plain.k), round_to(arrays.v, kv_type.plain.v)
    n_layers, n_heads_kv, n_tokens, _ = k.shape
    group = arrays.q.shape[1] // n_heads_kv
    profiles = profiles or {}
    calibrated = profiles["scorer"].values if "scorer" in profiles else [None] * n_layers
    held = [
        [
            _Held(np.zeros(0, np.int32), k[i, h, :0], v[i, h, :0], np.zeros(0), np.zeros(0, np.float32))
            for h in range(n_heads_kv)
        ]
        for i in range(n_layers)
    ]
    for first in range(0, n_tokens, step):
        new = slice(first, min(first + step, n_tokens))
        for i, heads in enumerate(held):
            for h, head in enumerate(heads):
                head.append(np.arange(new.start, new.stop, dtype=np.int32), k[i, h, new], v[i, h, new])
                head.attend(arrays.q[i, h * group : (h + 1) * group, new])
            q = arrays.q[i, :, : new.stop]
            seen = Layer(q, k[i], v[i], arrays.image_mask, i, n_layers, None, calibrated[i], arrays.rotation, all_q=q)
            _compress(plan, heads, seen, kv_type, None if arrays.projection is None else arrays.projection[i])
    empty = np.zeros((n_layers, n_heads_kv, 0), np.float32)
    left = ([[getattr(head, x) for head in heads] for heads in held] for x in ("tokens", "k", "v", "bias"))
    kept, k_left, v_left, bias = left
    return Result(kept, k_left, v_left, empty, bias)


def _compress(
    plan: Plan, heads: list[_Held], stream: Layer, kv_type: KvType, projection: np.ndarray | None = None
) -> None:
    """Compresses one layer. stream: all tokens so far. projection: [H, d_v, D], for the critical rule."""
    n = len(heads[0].tokens)
    budget = plan.count(n)
    if budget >= n:
        return
    scores = _scores(plan, heads, stream)
    weights = None
    if plan.critical != "none" and projection is not None:
        weights = critical.value_weights(np.stack([head.v for head in heads]), projection, plan.critical)
    for h, head in enumerate(heads):
        of_head = None if weights is None else weights[h]
        kept = select(plan, scores[h], stream.image_mask[head.tokens], budget, weights=of_head)
        whole = Head(head.k, head.v, kept, protection(plan, n, budget), stream.index, stream.n_layers, h, head.bias)
        head.k, head.v, head.bias = reduced(plan, whole, kv_type)
        head.tokens, head.sums = head.tokens[kept], head.sums[kept]


def _scores(plan: Plan, heads: list[_Held], stream: Layer) -> np.ndarray:
    """Returns scores [Hkv, n] float64."""
    scorer, group, n = registry.scorer(plan.scorer), len(stream.q) // len(heads), len(heads[0].tokens)

    def shown(first: int, last: int) -> np.ndarray:
        some = heads[first:last]
        k, v, sums, bias = (np.stack([getattr(h, x) for h in some]) for x in ("k", "v", "sums", "bias"))
        layer = replace(
            stream,
            q=stream.q[first * group : last * group, stream.q.shape[1] - n :],  # as many last queries as held rows
            k=k,
            v=v,
            image_mask=stream.image_mask[some[0].tokens],
            column_sums=sums,
            bias=bias,
            tokens=np.stack([h.tokens for h in some]),
            all_q=stream.q[first * group : last * group],
            profile=None if stream.profile is None else stream.profile[first:last],
        )
        return scorer.score(layer, plan.settings("scorer"))

    if scorer.by_place:
        return shown(0, len(heads))
    # head by head, because each head holds different tokens and has a different image mask
    return np.concatenate([shown(h, h + 1) for h in range(len(heads))])
