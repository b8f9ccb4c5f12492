"""What the storage types of keys and values cost in fidelity, on the demo model.

    python3 scripts/dev.py python scripts/measure_kv_types.py

Kullback-Leibler divergence, in nats per token, of the next token's distribution from the one that the full f16 cache
gives, along the right answers to held-out questions about images, and the share of tokens at which both find the same
one likeliest. What they cost in bytes and speed `kvedge bench --kv-type` measures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import pykvedge
from pykvedge.lab.demo_tasks.evalset import Sample, samples
from pykvedge.lab.eval.metrics import log_softmax
from pykvedge.lab.tables import markdown
from pykvedge.plans.kvtypes import QUANTISED, KvType

DATA = Path(pykvedge.__file__).resolve().parent / "data"
TASKS = ("code", "describe", "where", "which-image", "code-in-image-k", "difference")
TYPES = ("f16", *QUANTISED)
BUDGETS = (1.0, 0.25)


def make_plan(method: str, budget: float) -> pykvedge.Plan:
    return pykvedge.plan("full") if budget == 1.0 else pykvedge.plan(method, budget)


def along_the_answer(session: pykvedge.Session, sample: Sample) -> np.ndarray:
    """Returns log-probabilities [n + 1, vocabulary] of the next token, before each of the right answer and after it."""
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
        with pykvedge.Session(*files, make_plan(args.method, budget), threads=args.threads, kv_type=kv_type) as session:
            found = [along_the_answer(session, s) for s in chosen]
        expected = expected or found  # the first is the full f16 cache
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10, help="of each task (default %(default)s)")
    parser.add_argument("--images", type=int, default=4, help="of the needle tasks (default %(default)s)")
    parser.add_argument("--task", action="append", default=[], choices=TASKS, help="repeatable")
    parser.add_argument("--type", action="append", default=[], help="besides f16; repeatable, also K:V")
    parser.add_argument("--method", default="h2o", help="where the budget is not 1 (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a Markdown table")
    args = parser.parse_args()
    args.type = ["f16", *(args.type or TYPES[1:])]
    rows = table(args)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
