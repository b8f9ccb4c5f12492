"""Compares kvedge with unpatched llama.cpp on one model, in one run: speed of prefill and decode, and logits.

    python3 scripts/dev.py python experiments/compare_with_stock.py MODEL.gguf --tokens 2560 --budget 0.2
    python3 scripts/dev.py python experiments/compare_with_stock.py MODEL.gguf --logits

Variants: "stock" is unpatched llama.cpp with its default settings; "patched" is the patched library without kvedge
attached; "full" and the methods use kvedge's store. The variants take turns, so that a change of the machine's speed
affects all of them; ratios are of medians. The tokens are random: time and arithmetic do not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import log
from measuring import Worker, options, require, show
from random_walk import largest_divergence


def measure_speed(args: argparse.Namespace, sides: dict[bool, Worker]) -> list[dict[str, Any]]:
    """Measures the rows of the speed table: medians over rounds."""
    variants: dict[str, tuple[Worker, str | None]] = {"stock": (sides[False], None)}
    variants |= {"patched": (sides[True], None), "full": (sides[True], "full")}
    variants |= {method: (sides[True], method) for method in args.method}
    prefill: dict[str, list[float]] = {name: [] for name in variants}
    compress: dict[str, list[float]] = {name: [] for name in variants}
    steps: dict[str, list[float]] = {name: [] for name in variants}
    n_ctx = args.tokens + args.rounds * args.steps + 64

    for turn in range(args.prefills):
        for name, (worker, method) in variants.items():
            log(f"prefill {turn + 1} of {args.prefills}: {name}")
            if turn:
                worker.call("close", name=name)
            worker.call("open", name=name, n_ctx=n_ctx, method=method, budget=args.budget, flash=True)
            took = worker.call("prefill", name=name, n=args.tokens, seed=turn)
            prefill[name].append(took["prefill_s"])
            compress[name].append(took["compress_s"])
    for turn in range(args.rounds + 1):
        log(f"decode {turn} of {args.rounds}" if turn else "decode: warm-up")
        for name, (worker, _) in variants.items():
            seconds = worker.call("generate", name=name, n=args.steps if turn else 2, seed=turn)["seconds"]
            steps[name] += seconds if turn else []
    rows = []
    for name in variants:
        read, packed = statistics.median(prefill[name]), statistics.median(compress[name])
        step = statistics.median(steps[name])
        rows.append(
            {
                "variant": name,
                "prefill_tok_s": args.tokens / read,
                "compress_s": packed,
                "prefill_time_vs_stock": (read + packed) / statistics.median(prefill["stock"]),
                "decode_tok_s": 1 / step,
                "decode_vs_stock": statistics.median(steps["stock"]) / step,
                "decode_spread": [1 / max(steps[name]), 1 / min(steps[name])],
            }
        )
    return rows


def compare_logits(args: argparse.Namespace, sides: dict[bool, Worker]) -> list[dict[str, Any]]:
    """Returns the rows of the logits table, one for each prompt."""
    runs = {
        "stock": (False, None, True),
        "stock without flash attention": (False, None, False),
        "patched": (True, None, True),
        "full": (True, "full", True),
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for prompt, n in enumerate(args.prompts):
            log(f"logits of a prompt of {n} tokens and {args.forced} steps")
            out = {}
            for name, (kvedge, method, flash) in runs.items():
                worker, file = sides[kvedge], str(Path(folder) / f"{prompt}.npy")
                worker.call("open", name=name, n_ctx=n + args.forced + 8, method=method, budget=1.0, flash=flash)
                worker.call("logits", name=name, n=n, steps=args.forced, seed=prompt, file=file)
                worker.call("close", name=name)
                out[name] = np.load(file)
            exact = "stock without flash attention"
            rows.append(
                {
                    "prompt": n,
                    "steps": args.forced,
                    "patched_identical_to_stock": bool(np.array_equal(out["stock"], out["patched"])),
                    "kl_full_to_stock": largest_divergence(out["stock"], out["full"]),
                    "kl_full_to_stock_f32": largest_divergence(out[exact], out["full"]),
                    "kl_stock_to_stock_f32": largest_divergence(out[exact], out["stock"]),
                }
            )
    return rows


def main() -> None:
    parser = options(__doc__, images=False)
    add = parser.add_argument
    add("--method", action="append", default=[], help="repeatable (default lookm)")
    add("--budget", type=float, default=0.2)
    add("--prefills", type=int, default=3, help="prefills of each variant (default %(default)s)")
    add("--rounds", type=int, default=8, help="rounds of decoding (default %(default)s)")
    add("--steps", type=int, default=6, help="tokens of each variant in a round (default %(default)s)")
    add("--logits", action="store_true", help="compare logits instead of speed")
    add("--prompts", type=int, nargs="+", default=[17, 300, 900], help="prompt lengths for --logits")
    add("--forced", type=int, default=64, help="teacher-forced steps for --logits (default %(default)s)")
    args = parser.parse_args()
    args.method = args.method or ["lookm"]
    require(parser, args)
    sides = {kvedge: Worker(args.model, args.threads, kvedge) for kvedge in (False, True)}
    try:
        show(compare_logits(args, sides) if args.logits else measure_speed(args, sides), args.json)
    finally:
        for side in sides.values():
            side.end()


if __name__ == "__main__":
    main()
