"""Figures of the KV memory, as a report has them."""

from __future__ import annotations

from pykvedge.models.model import Model
from pykvedge.plans.kvtypes import KvType
from pykvedge.runtime.libkvedge import Cache
from pykvedge.runtime.llama_context import Context
from pykvedge.runtime.report import Kv


def of_llama(model: Model, context: Context, kv_type: str) -> Kv:
    """Of a model that runs as it is: llama.cpp allocates for the whole context at once."""
    n = model.kv_bytes_per_token(KvType.parse(kv_type).plain.bytes_per_value) * context.n_ctx
    return Kv(n, n, n)


def of_cache(model: Model, cache: Cache, kv_type: str, compressed: bool) -> Kv:
    """Of all that the cache holds. compressed: whether the prompt that was just read was."""
    stats = cache.stats()
    there = max(stats.before_bytes, stats.bytes) if compressed else stats.bytes
    return Kv(
        full_bytes=max(there, uncompressed(model, cache, kv_type)),
        kept_bytes=stats.after_bytes if compressed else stats.bytes,
        peak_bytes=stats.peak_bytes,
        kept_per_layer=per_layer(cache),
    )


def uncompressed(model: Model, cache: Cache, kv_type: str) -> int:
    """Bytes of all tokens that were ever read, had none been dropped and none been quantised."""
    stats, element = cache.stats(), KvType.parse(kv_type).plain.bytes_per_value
    return int(stats.n_tokens * stats.n_layers * stats.n_heads_kv * model.pair_width * element)


def per_layer(cache: Cache) -> list[float]:
    """KV pairs per KV head that are held now, averaged over the heads of each stored layer, to two places."""
    means = (round(sum(heads) / len(heads), 2) for heads in cache.lengths() if heads)
    return [int(n) if n == int(n) else n for n in means]
