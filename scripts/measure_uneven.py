"""What budgets per head cost: bytes of the KV buffers beside the bytes of the pairs that the heads keep.

    python3 scripts/dev.py python scripts/measure_uneven.py MODEL.gguf
    python3 scripts/dev.py python scripts/measure_uneven.py MODEL.gguf --tokens 1024 --budget 0.1 --json

MODEL is a text model of the shape in question (scripts/make_shape_model.py llava-1.4b -o DIR writes one). Rows:
adakv, adakv without its floor, and sparsemm with a made-up profile in which few heads have nearly all of the score.
Columns: pairs of the shortest and of the longest head, pairs in all, bytes of these pairs, bytes of the buffers, their
ratio, and what the process gave back to the system as a share of what the buffers shrank by.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import pykvedge
from pykvedge.models.model import Model
from pykvedge.native import memory
from pykvedge.plans.stages.base import ProfileTable
from pykvedge.runtime.libkvedge import Cache
from pykvedge.runtime.llama_context import Context, ContextSize

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adakv": ("adakv", {}),
    "adakv, no floor": ("adakv", {"allocator.floor": 0.0}),
    "sparsemm, few heads": ("sparsemm", {"allocator.ratio": 0.0}),
}


def few_heads(model: Model) -> ProfileTable:
    """Scores of query heads, most of them next to nothing."""
    heads = model.llama.llama_model_n_head(model.handle)
    scores = np.random.default_rng(0).gamma(0.1, 1.0, (model.n_layer, heads)).astype(np.float32)
    return ProfileTable(scores, np.zeros(0, dtype=np.float32))


def row(name: str, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    method, settings = VARIANTS[name]
    plan = pykvedge.plan(method, args.budget, **settings)
    profiles = {"allocator": few_heads(model)} if plan.profile_kinds() else None
    context = Context(model, ContextSize(args.tokens + 64), args.threads)
    cache = Cache(context.handle, plan, "f16", auto_compress=False, profiles=profiles)
    try:
        tokens = np.random.default_rng(1).integers(300, min(30000, model.n_vocab), args.tokens).tolist()
        context.decode(tokens, want_logits=True)
        before = memory.rss_bytes()
        cache.compress()
        after = memory.rss_bytes()
        lengths, stats = np.array(cache.lengths()), cache.stats()
    finally:
        cache.detach()
        context.close()
    pairs = int(lengths.sum()) * model.pair_width * 2
    return {
        "variant": name,
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "pairs": int(lengths.sum()),
        "pair_bytes": pairs,
        "buffer_bytes": stats.bytes,
        "ratio": stats.bytes / pairs,
        "rss_share": (before - after) / (stats.before_bytes - stats.after_bytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="GGUF file of the text model")
    add("--tokens", type=int, default=2560, help="prompt length (default %(default)s)")
    add("--budget", default="0.2", help="(default %(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
    add("--json", action="store_true")
    args = parser.parse_args()
    if not Path(args.model).is_file():
        parser.error(f"{args.model} is not a file; scripts/make_shape_model.py writes models to measure with")
    model = Model(args.model, 0)
    rows = [row(name, model, args) for name in VARIANTS]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("variant               shortest  longest     pairs    pair bytes  buffer bytes   ratio   of RSS")
    for r in rows:
        print(
            f"{r['variant']:20} {r['shortest']:9} {r['longest']:8} {r['pairs']:9} {r['pair_bytes']:13} "
            f"{r['buffer_bytes']:13} {r['ratio']:7.4f} {r['rss_share']:8.3f}"
        )


if __name__ == "__main__":
    main()
