"""Measures the memory of a prompt beyond the weights: stock llama.cpp, kvedge, and bounded prefill, each in a process.

    python3 scripts/dev.py python experiments/measure_bounded.py MODEL.gguf
    python3 scripts/dev.py python experiments/measure_bounded.py MODEL --method mixkv --tokens 5120 --images 8 --json

MODEL is a text model of the shape in question (scripts/make_shape_model.py llava-1.5-7b -o DIR writes one). The prompt
is text and images, which come as embeddings. Columns: largest KV bytes (with scores and indices); largest anonymous
memory beyond that of the process with loaded weights; both also as a share of stock's; the same after the first
generated token; seconds; and the share of kept pairs that a side has in common with `one pass`: the same prompt in one
pass, compressed at its end. Stock's KV bytes are its buffers; its settings are llama.cpp's defaults except the context
length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import log
from measuring import libraries, options, pieces, require, show

from pykvedge.system.memory import PeakMeter, own_bytes

SIDES = ("stock", "ordinary", "one pass", "bounded")


def image_rows(n: int, width: int, number: int) -> np.ndarray:
    """Draws embeddings [n, width] float32."""
    return np.random.default_rng(number).standard_normal((n, width), dtype=np.float32) * np.float32(0.02)


def text_tokens(n: int, number: int) -> list[int]:
    """Draws n random text tokens."""
    return [int(t) for t in np.random.default_rng(1000 + number).integers(300, 30000, n)]


def read_in_pieces(llama: Any, context: Any, width: int, args: argparse.Namespace) -> None:
    """Decodes the prompt as llama.cpp's programs do: text as tokens, an image as embeddings."""
    past = 0
    for number, (n, image) in enumerate(pieces(args.images, args.image_tokens, args.tokens)):
        batch = llama.llama_batch_init(n, width if image else 0, 1)
        batch.n_tokens = n
        if image:
            np.ctypeslib.as_array(batch.embd, (n * width,))[:] = image_rows(n, width, number).ravel()
        else:
            np.ctypeslib.as_array(batch.token, (n,))[:] = text_tokens(n, number)
        for i in range(n):
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = past + i, 1, 0
            batch.logits[i] = past + i == args.tokens - 1
        status = llama.llama_decode(context, batch)
        llama.llama_batch_free(batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")
        past += n


def answer(llama: Any, context: Any, position: int) -> None:
    """Decodes one token, the first of an answer."""
    batch = llama.llama_batch_init(1, 0, 1)
    batch.n_tokens = batch.n_seq_id[0] = batch.logits[0] = 1
    batch.token[0], batch.pos[0], batch.seq_id[0][0] = 300, position, 0
    status = llama.llama_decode(context, batch)
    llama.llama_batch_free(batch)
    if status != 0:
        raise SystemExit(f"llama_decode returned {status} for the first token of the answer")


def stock_side(args: argparse.Namespace) -> dict[str, Any]:
    import llama_cpp.llama_cpp as llama

    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(args.model.encode(), llama.llama_model_default_params())
    before, start, meter = own_bytes(), time.perf_counter(), PeakMeter(own_bytes)
    meter.start()
    params = llama.llama_context_default_params()
    params.n_ctx = args.tokens + 64
    params.n_threads = params.n_threads_batch = args.threads
    context = llama.llama_init_from_model(model, params)
    read_in_pieces(llama, context, llama.llama_model_n_embd(model), args)
    peak, seconds = meter.stop(), time.perf_counter() - start
    answer(llama, context, args.tokens)
    heads = llama.llama_model_n_head_kv(model) * llama.llama_model_n_layer(model)
    size = llama.llama_model_n_embd(model) // llama.llama_model_n_head(model)
    return {
        "kv_peak_bytes": llama.llama_n_ctx(context) * heads * size * 4,
        "beyond_weights_bytes": peak - before,
        "answering_bytes": own_bytes() - before,
        "seconds": seconds,
    }


def our_side(args: argparse.Namespace) -> dict[str, Any]:
    import pykvedge
    from pykvedge.library.libkvedge import Cache
    from pykvedge.models.model import Model
    from pykvedge.models.offload import Offload
    from pykvedge.models.token_table import TokenTable
    from pykvedge.plans.amounts import Budget
    from pykvedge.runtime.llama_context import Context, ContextSize

    def of_prompt(tokens: list[int]) -> list[int]:
        return [t for t in tokens if t < args.tokens]

    model = Model(Path(args.model), Offload(gpu_layers=0))
    plan = pykvedge.plan(args.method, args.budget)
    # a budget in pairs that covers the prompt gathers everything and drops nothing, until the real plan is set
    first = plan.with_(budget=Budget(pairs=args.tokens)) if args.side == "one pass" else plan
    before, start, meter = own_bytes(), time.perf_counter(), PeakMeter(own_bytes)
    meter.start()
    n_ubatch = 512 if args.side == "ordinary" else args.tokens
    context = Context(model, ContextSize(args.tokens + 64, n_ubatch), args.threads)
    cache = Cache(context.handle, first, "f16", auto_compress=False)
    if args.side == "ordinary":
        read_in_pieces(context.llama, context.handle, model.n_embd_input, args)
    else:
        prompt = whole_prompt(TokenTable(model.header), model.n_embd_input, args)
        cache.bound_prompt(prompt.image_mask)
        context.decode_whole(prompt)
        cache.set_plan(plan)
        del prompt
    cache.compress()
    peak, seconds = meter.stop(), time.perf_counter() - start
    answer(context.llama, context.handle, args.tokens)
    held = own_bytes() - before
    kept = [[of_prompt(cache.tokens(i, h)) for h in range(len(x))] for i, x in enumerate(cache.lengths())]
    return {
        "kv_peak_bytes": cache.stats().peak_bytes,
        "beyond_weights_bytes": peak - before,
        "answering_bytes": held,
        "seconds": seconds,
        "kept": kept,
    }


def whole_prompt(table: Any, width: int, args: argparse.Namespace) -> Any:
    """Makes the prompt one batch of embeddings."""
    from pykvedge.runtime.bounded_batch import OnePass

    embeddings = np.empty((args.tokens, width), dtype=np.float32)
    mask, at = np.zeros(args.tokens, dtype=np.uint8), 0
    for number, (n, image) in enumerate(pieces(args.images, args.image_tokens, args.tokens)):
        embeddings[at : at + n] = image_rows(n, width, number) if image else table.rows(text_tokens(n, number))
        mask[at : at + n] = image
        at += n
    return OnePass(np.arange(args.tokens, dtype=np.int32)[None, :], mask, args.tokens, embeddings=embeddings)


def run(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one side in a separate process, with stock's library or kvedge's."""
    command = [sys.executable, __file__, args.model, "--side", side]
    for name in ("method", "budget", "tokens", "images", "image_tokens", "threads"):
        command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=libraries(side != "stock"), check=False)
    if done.returncode != 0:
        raise SystemExit(f"measure_bounded: the side '{side}' ended with code {done.returncode}; its message is above")
    return json.loads(done.stdout.splitlines()[-1])


def in_common(a: list[list[list[int]]], b: list[list[list[int]]]) -> float:
    """Returns the share of a's kept pairs that b also keeps."""
    pairs = [(set(x), set(y)) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    return sum(len(x & y) for x, y in pairs) / sum(len(x) for x, _ in pairs)


def in_mib(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with MiB instead of bytes."""
    return {k.replace("bytes", "MiB"): v / 2**20 if k.endswith("_bytes") else v for k, v in row.items()}


def main() -> None:
    parser = options(__doc__)
    add = parser.add_argument
    add("--method", default="lookm", help="one whose layers can be decided one by one (default %(default)s)")
    add("--budget", default="0.2", help="(default %(default)s)")
    add("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(stock_side(args) if args.side == "stock" else our_side(args)))
        return
    require(parser, args)
    if not Path("/proc/self/status").exists():
        parser.error("anonymous memory is read from /proc, which this system lacks")
    found = {}
    for side in SIDES:
        log(f"{side} ...")
        found[side] = run(side, args)
    kept = {side: found[side].pop("kept", None) for side in SIDES}
    rows = [
        {
            "side": side,
            **figures,
            "kv_of_stock": figures["kv_peak_bytes"] / found["stock"]["kv_peak_bytes"],
            "beyond_of_stock": figures["beyond_weights_bytes"] / found["stock"]["beyond_weights_bytes"],
            "in_common": in_common(kept[side], kept["one pass"]) if kept[side] else None,
        }
        for side, figures in found.items()
    ]
    show(rows if args.json else [in_mib(row) for row in rows], args.json)


if __name__ == "__main__":
    main()
