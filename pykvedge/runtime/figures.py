"""These are the figures of the KV memory that a report has."""

from __future__ import annotations

from pykvedge.library.libkvedge import Cache
from pykvedge.models.model import Model
from pykvedge.reference.kvtypes import KvType
from pykvedge.runtime.report import DeviceWork


def device_work(cache: Cache, sequence: int = 0) -> DeviceWork | None:
    """Tells what the last compression did on devices; None where no rows lay there."""
    stats, problem = cache.stats(sequence), cache.device_problem(sequence)
    if not stats.device_compressed and not problem:
        return None
    steps = (f"{name}_us" for name in ("measure", "choose", "gather", "merge", "upload"))
    return DeviceWork(
        bool(stats.device_compressed),
        problem,
        stats.device_fetched_bytes,
        stats.device_sent_bytes,
        stats.device_operations,
        *(getattr(stats, f"device_{step}") / 1e6 for step in steps),
    )


def uncompressed(model: Model, cache: Cache, kv_type: str | KvType, sequence: int = 0) -> int:
    """Counts the bytes of all tokens that were ever read, had none been dropped and none been quantised."""
    stats, element = cache.stats(sequence), KvType.parse(kv_type).plain.bytes_per_value
    return int(stats.n_tokens * stats.n_layers * stats.n_heads_kv * model.pair_width * element)


def per_layer(cache: Cache, sequence: int = 0) -> list[float]:
    """Averages the KV pairs that are held now over the heads of each stored layer, to two places."""
    means = (round(sum(heads) / len(heads), 2) for heads in cache.lengths(sequence) if heads)
    return [int(n) if n == int(n) else n for n in means]


def notes(cache: Cache, sequence: int = 0) -> list[str]:
    """Says why no whole rows are kept, and in how many heads the last compression had too few queries to fit rows."""
    stats, out = cache.stats(sequence), []
    if problem := cache.keep_problem(sequence):
        out.append(f"whole rows are not kept: {problem}; what was evicted is gone")
    if stats.n_unfitted:
        out.append(
            f"{stats.n_unfitted} heads were not matched, as fewer queries of the prompt were kept than rows are left; "
            "they keep rows as reducer evict leaves them"
        )
    return out
