"""Measures the fidelity of the storage types of keys and values, on the demo model.

    python3 scripts/dev.py python experiments/measure_kv_types.py
    python3 scripts/dev.py python experiments/measure_kv_types.py --stock

Prints the Kullback-Leibler divergence of the next token, in nats per token, from the full f16 cache, along the right
answers to held-out questions about images, and the share of tokens where both have the same likeliest token. `kvedge
bench --kv-type` measures bytes and speed.

--stock: the same for llama.cpp's types, in llama.cpp's cache (build_stock.py), which it rotates in the cases where
kvedge does; and in kvedge's cache without and with rotation. Tiny models with random weights, head sizes 64 and 128,
whose keys have no larger channels, or two pairs of larger channels. Random prompts, then random tokens one by one,
whose logits count. The reference is llama.cpp's cache in f32, without flash attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import log
from measuring import STOCK_LIB, Worker
from modelgen.tiny import default_spec, write_tiny

import pykvedge
from kvedge_lab.demo_tasks.evalset import Sample, samples
from kvedge_lab.eval.metrics import log_softmax
from pykvedge.cli.tables import markdown
from pykvedge.reference.kvtypes import QUANTISED, KvType

DATA = Path(pykvedge.__file__).resolve().parent / "data"
TASKS = ("code", "describe", "where", "which-image", "code-in-image-k", "difference")
TYPES = ("f16", *QUANTISED)
BUDGETS = (1.0, 0.25)
HEAD_SIZES, OUTLIERS, STEPS = (64, 128), (1.0, 8.0), 64
SIDES = {"llama.cpp": None, "kvedge, off": "off", "kvedge, auto": "auto"}  # kv_rotate of kvedge's sides


def make_plan(method: str, budget: float) -> pykvedge.Plan:
    return pykvedge.plan("full") if budget == 1.0 else pykvedge.plan(method, budget)


def along_the_answer(session: pykvedge.Session, sample: Sample) -> np.ndarray:
    """Returns log-probabilities [n + 1, vocabulary] before each token of the right answer and after it."""
    session.clear()
    session.ask(sample.question.text, sample.images())
    rows = [log_softmax(session.engine.context.logits())]
    for token in session.model.tokenize(sample.answer):
        session.engine.extend(token)
        rows.append(log_softmax(session.engine.context.logits()))
    return np.stack(rows)


def fidelity(args: argparse.Namespace) -> dict[tuple[str, float], dict[str, float]]:
    tasks = args.task or TASKS
    chosen = [s for task in tasks for s in itertools.islice(samples(task, 7, args.images), args.samples)]
    out: dict[tuple[str, float], dict[str, float]] = {}
    expected: list[np.ndarray] = []
    for kv_type, budget in itertools.product(args.type, BUDGETS):
        print(f"fidelity: {kv_type} at {budget:g}", file=sys.stderr, flush=True)
        files = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"
        how: dict[str, Any] = {"threads": args.threads, "kv_type": kv_type, "kv_rotate": args.kv_rotate}
        with pykvedge.Session(*files, make_plan(args.method, budget), **how) as session:
            found = [along_the_answer(session, s) for s in chosen]
        expected = expected or found  # the first type is the full f16 cache
        full, here = np.concatenate(expected), np.concatenate(found)
        out[kv_type, budget] = {
            "kl": float((np.exp(full) * (full - here)).sum(axis=1).mean()),
            "top1": float((full.argmax(axis=1) == here.argmax(axis=1)).mean()),
        }
    return out


def table(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = fidelity(args)
    return [
        {"type": kv_type, "budget": budget, "bits": 8 * KvType.parse(kv_type).bytes_per_value, **found[kv_type, budget]}
        for budget, kv_type in itertools.product(BUDGETS, args.type)
    ]


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"Below a budget of 1 method {args.method}.\n")
    cells = [[r["type"], f"{r['budget']:g}", f"{r['bits']:g}", f"{r['kl']:.5f}", f"{r['top1']:.1%}"] for r in rows]
    print(markdown([["type", "budget", "bits a number", "KL, nats a token", "same top token"], *cells]))


def logits(worker: Worker, stored: list[str], method: str | None, prompt: tuple[int, int], flash: bool) -> np.ndarray:
    """Returns log-probabilities [STEPS, vocabulary] after each token that follows a prompt. prompt: (tokens, seed)."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "logits.npy")
        n, seed = prompt
        worker.call("open", name="x", n_ctx=n + STEPS + 8, method=method, budget=1.0, flash=flash, stored=stored)
        worker.call("logits", name="x", n=n, steps=STEPS, seed=seed, file=file)
        worker.call("close", name="x")
        return log_softmax(np.load(file)[1:])  # no row is quantised yet at the first one


def against_stock(model: Path, prompts: list[tuple[int, int]], threads: int) -> list[dict[str, Any]]:
    """Returns a row for each type: nats per token of every side."""
    workers = {kvedge: Worker(str(model), threads, kvedge) for kvedge in (False, True)}
    try:
        exact = np.concatenate([logits(workers[False], ["f32"], None, p, False) for p in prompts])
        rows = []
        for kv_type in ("f16", "q8_0", "q4_0"):
            row: dict[str, Any] = {"type": kv_type}
            for side, rotate in SIDES.items():
                how = (workers[bool(rotate)], [kv_type, rotate or "auto"], "full" if rotate else None)
                here = np.concatenate([logits(*how, p, True) for p in prompts])
                row[side] = float((np.exp(exact) * (exact - here)).sum(axis=1).mean())
            rows.append(row)
        return rows
    finally:
        for worker in workers.values():
            worker.end()


def stock_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for size, outliers in itertools.product(HEAD_SIZES, OUTLIERS):
        log(f"head size {size}, outliers {outliers:g}")
        spec = dataclasses.replace(
            default_spec("llama"), n_layers=4, head_size=size, weight=args.weight, key_outliers=outliers
        )
        with tempfile.TemporaryDirectory() as folder:
            model, _ = write_tiny("llama", folder, spec=spec)
            prompts = list(zip(args.prompts, range(len(args.prompts)), strict=True))
            about = {"head size": size, "outliers": outliers}
            rows += [{**about, **row} for row in against_stock(model, prompts, args.threads)]
    return rows


def show_stock(rows: list[dict[str, Any]]) -> None:
    print(markdown([list(rows[0]), *[[x if isinstance(x, str) else f"{x:.3g}" for x in r.values()] for r in rows]]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10, help="of each task (default %(default)s)")
    parser.add_argument("--images", type=int, default=4, help="of the needle tasks (default %(default)s)")
    parser.add_argument("--task", action="append", default=[], choices=TASKS, help="repeatable")
    parser.add_argument("--type", action="append", default=[], help="besides f16; repeatable, also K:V")
    parser.add_argument("--method", default="h2o", help="where the budget is not 1 (default %(default)s)")
    parser.add_argument("--kv-rotate", default="auto", choices=("auto", "off"), help="default %(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a Markdown table")
    parser.add_argument("--stock", action="store_true", help="against llama.cpp's own cache, on tiny models")
    parser.add_argument("--weight", default="f16", choices=("f16", "f32"), help="of these (default %(default)s)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[200, 700, 1500], help="their tokens, for --stock")
    args = parser.parse_args()
    if args.stock:
        if not STOCK_LIB.is_dir():
            parser.error(f"{STOCK_LIB} is missing; python3 scripts/build_stock.py builds it")
        found = stock_table(args)
        print(json.dumps(found, indent=1)) if args.json else show_stock(found)
        return 0
    args.type = ["f16", *(args.type or TYPES[1:])]
    rows = table(args)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
