"""These are the figures of the KV memory that a report has."""

from __future__ import annotations

from pykvedge.models.model import Model
from pykvedge.plans.kvtypes import KvType
from pykvedge.runtime.libkvedge import Cache
from pykvedge.runtime.report import Kv


def of_cache(model: Model, cache: Cache, kv_type: str, compressed: bool) -> Kv:
    """Measures all that the cache holds. compressed: whether the prompt that was just read was."""
    stats = cache.stats()
    there = max(stats.before_bytes, stats.bytes) if compressed else stats.bytes
    return Kv(
        full_bytes=max(there, uncompressed(model, cache, kv_type)),
        kept_bytes=stats.after_bytes if compressed else stats.bytes,
        peak_bytes=stats.peak_bytes,
        kept_per_layer=per_layer(cache),
    )


def uncompressed(model: Model, cache: Cache, kv_type: str) -> int:
    """Counts the bytes of all tokens that were ever read, had none been dropped and none been quantised."""
    stats, element = cache.stats(), KvType.parse(kv_type).plain.bytes_per_value
    return int(stats.n_tokens * stats.n_layers * stats.n_heads_kv * model.pair_width * element)


def per_layer(cache: Cache) -> list[float]:
    """Averages the KV pairs that are held now over the heads of each stored layer, to two places."""
    means = (round(sum(heads) / len(heads), 2) for heads in cache.lengths() if heads)
    return [int(n) if n == int(n) else n for n in means]
