"""The NumPy engine: runs a plan on arrays by the definitions in stages/. It is slow, and libkvedge's oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pykvedge.plans import registry
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages import critical
from pykvedge.reference.stages.base import Head, Layer, ProfileTable, Prompt, Result
from pykvedge.reference.stages.replay import Replay
from pykvedge.reference.stages.rotation import Rotation
from pykvedge.reference.storage import round_to, stored_keys, stored_values


class Arrays(NamedTuple):
    """One prompt: q [L, H, T, d], k and v [L, Hkv, T, d], contiguous float32; image_mask [T] bool."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    image_mask: np.ndarray
    rotation: Rotation | None = None  # rotary encoding of q and k; None: no rotary encoding
    projection: np.ndarray | None = None  # W_O [L, H, d, D] contiguous float32; None: unknown
    replay: Replay | None = None  # a second pass over the prompt; None: no second pass


def protection(plan: Plan, n_tokens: int, kept: int) -> np.ndarray:
    """Returns [T] bool: the first and last tokens that stay whatever their score, if a head keeps `kept` tokens."""
    recent, sinks = plan.protected(n_tokens, kept)
    index = np.arange(n_tokens)
    return (index < sinks) | (index >= n_tokens - recent)


def select(
    plan: Plan,
    scores: np.ndarray,
    image_mask: np.ndarray,
    kept: int,
    reserve: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the tokens that one KV head keeps, ascending int32. scores: [T] float64; image_mask: [T] bool.

    Protected tokens come first, then tokens by (class, score). Text ranks above image tokens if the plan says so
    (LOOK-M, eq. 5 and 8). Equal scores go to the lower index. With a second score, reserve [T] float64, the scorer's
    reserved tokens are chosen before that, by (class, reserve). With weights, [T] float64, the critical rule applies:
    scores choose until the first half is full, reserved tokens included, and weighted scores choose the rest.
    """
    n_tokens = len(scores)
    if kept >= n_tokens:
        return np.arange(n_tokens, dtype=np.int32)
    chosen = protection(plan, n_tokens, kept)
    mixed = bool(image_mask.any()) and not bool(image_mask.all())
    text = ~image_mask if plan.text_prior and mixed else np.zeros(n_tokens, dtype=bool)
    rest = kept - int(chosen.sum())
    if plan.text_overflow == "keep_all":
        rest = max(rest, int(text[~chosen].sum()))
    turns: list[tuple[np.ndarray, int]] = []
    first = 0
    if reserve is not None:
        first = min(rest, registry.scorer(plan.scorer).reserved(kept, plan.settings("scorer")))
        turns.append((reserve, first))
    if weights is not None:
        half = min(rest, critical.first_half(plan.critical_half, kept, int(chosen.sum())))
        turns.append((scores, max(0, half - first)))
        scores, first = critical.weighed(scores, weights), max(first, half)
    turns.append((scores, rest - first))
    for by, count in turns:
        order = np.lexsort((-by, ~text))  # lexsort is stable: by class, then score, then index
        chosen[order[~chosen[order]][:count]] = True
    return np.flatnonzero(chosen).astype(np.int32)


def run(
    plan: Plan, arrays: Arrays, kv_type: KvType | str, profiles: Mapping[str, ProfileTable] | None = None
) -> Result:
    """Returns what the plan keeps of a prompt whose keys and values are stored as kv_type.

    profiles: stage name -> table. Scores and merges use unquantised numbers: f16 if the type is quantised. The kept
    rows are rounded last, after a rotation if the type has one.
    """
    kv_type = KvType.parse(kv_type)
    q, image_mask, turned, projection = arrays.q, arrays.image_mask, arrays.rotation, arrays.projection
    k, v = round_to(arrays.k, kv_type.plain.k), round_to(arrays.v, kv_type.plain.v)
    n_layers, n_heads_kv, n_tokens, _ = k.shape
    group = q.shape[1] // n_heads_kv
    scorer, allocator = registry.scorer(plan.scorer), registry.allocator(plan.allocator)
    profiles = profiles or {}
    rows = profiles["scorer"].values if "scorer" in profiles else [None] * n_layers
    replay = arrays.replay and Replay(arrays.replay.q, round_to(arrays.replay.k, kv_type.plain.k), arrays.replay.chunks)
    layers = [
        Layer(
            q[i], k[i], v[i], image_mask, i, n_layers, profile=rows[i], rotation=turned, replay=replay,
            projection=None if projection is None else projection[i],
        )
        for i in range(n_layers)
    ]
    scores, reserve, attention = (_of_layers(f, layers, plan) for f in (scorer.score, scorer.reserve, scorer.attention))
    budget = plan.count(n_tokens)
    share = np.full((n_layers, n_heads_kv), n_tokens)
    if budget < n_tokens:
        recent = min(budget, plan.asked_recent(n_tokens, budget))
        fixed = 0 if plan.recent is None else recent
        prompt = Prompt(scores, image_mask, budget, recent, tuple(layers), profiles.get("allocator"), attention, fixed,
                        _variation(layers, plan))  # fmt: skip
        share = allocator.allocate(prompt, plan.settings("allocator"))
    out = Result([], [], [], scores.astype(np.float32))
    for i in range(n_layers):
        heads = []
        weights: np.ndarray | None = None
        if plan.critical != "none" and projection is not None:
            weights = critical.value_weights(v[i], projection[i], plan.critical)
        for h, count in enumerate(share[i].tolist()):
            others = (None if x is None else x[h] for x in (None if reserve is None else reserve[i], weights))
            kept = select(plan, scores[i, h], image_mask, count, *others)
            queries = q[i, h * group : (h + 1) * group]
            heads.append(Head(k[i, h], v[i, h], kept, protection(plan, n_tokens, count), i, n_layers, h, q=queries))
        rows = [reduced(plan, head, kv_type) for head in heads]
        out.kept.append([head.kept for head in heads])
        for column, of_head in zip((out.k, out.v, out.bias), zip(*rows, strict=True), strict=True):
            column.append(list(of_head))
    return out


def _of_layers(score: Any, layers: list[Layer], plan: Plan) -> Any:
    return np.stack([score(layer, plan.settings("scorer")) for layer in layers]) if score else None


def _variation(layers: list[Layer], plan: Plan) -> np.ndarray | None:
    of = registry.scorer(plan.scorer).variation
    found = [None if of is None else of(layer, plan.settings("scorer")) for layer in layers]
    return None if any(x is None for x in found) else np.stack(found)  # type: ignore[arg-type]


def reduced(plan: Plan, head: Head, kv_type: KvType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the stored rows of a head: k, v [n, d] float32 that the storage type can hold, and biases [n] float32."""
    k, v = head.k.copy(), head.v.copy()
    bias = np.zeros(len(head.kept)) if head.bias is None else head.bias[head.kept]
    if len(head.kept) < len(head.k):
        k, v, *biases = registry.reducer(plan.reducer).reduce(head, plan.settings("reducer"))
        bias = biases[0] if biases else bias
    key_block, value_block = kv_type.blocks(k.shape[1])
    return stored_keys(k, kv_type.k, key_block), stored_values(v, kv_type.v, value_block), bias.astype(np.float32)
