"""What the storage types of keys and values cost: bytes, fidelity on the demo model, and speed of decoding.

    python3 scripts/dev.py python scripts/measure_kv_types.py

Fidelity: Kullback-Leibler divergence, in nats per token, of the next token's distribution from the one that the full
f16 cache gives, along the right answers to held-out questions about images, and the share of tokens at which both find
the same one likeliest. Bytes: key and value buffers after a prompt of --tokens, page by page as they exist, over those
of the full f16 cache. Speed: tokens per second after that prompt, all types in turn in rounds of a few tokens, the
fastest round of each; only the ratios mean something.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import pykvedge
from pykvedge.lab.demo_tasks.evalset import Sample, samples
from pykvedge.lab.eval.metrics import log_softmax
from pykvedge.models.model import Model
from pykvedge.plans.kvtypes import QUANTISED, KvType
from pykvedge.runtime import libkvedge
from pykvedge.runtime.llama_context import Context, ContextSize

DATA = Path(pykvedge.__file__).resolve().parent / "data"
TASKS = ("code", "describe", "where", "which-image", "code-in-image-k", "difference")
TYPES = ("f16", *QUANTISED)
BUDGETS = (1.0, 0.25)
ROUND = 8  # tokens between two looks at the clock


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


class Reader:
    """A Reader has a context whose KV memory has a type, and a prompt of random tokens in it."""

    def __init__(self, model: Model, kv_type: str, plan: pykvedge.Plan, n_tokens: int, threads: int) -> None:
        self.context = Context(model, ContextSize(n_tokens + 1024, kv_type=kv_type), threads)
        self.cache = libkvedge.Cache(self.context.handle, plan, kv_type, auto_compress=False)
        self._tokens = np.random.default_rng(0).integers(10, model.n_vocab - 1, n_tokens).tolist()
        self.context.decode(self._tokens, want_logits=True)
        self.cache.compress()

    def decode(self, n: int) -> float:
        """Measures seconds per token."""
        started = time.perf_counter()
        for token in self._tokens[:n]:
            self.context.decode([token], want_logits=True)
        return (time.perf_counter() - started) / n

    def close(self) -> None:
        self.cache.detach()
        self.context.close()


def bytes_and_speed(args: argparse.Namespace) -> dict[tuple[str, float], dict[str, float]]:
    out: dict[tuple[str, float], dict[str, float]] = {}
    model = Model(args.model)
    for budget in BUDGETS:
        readers = {}
        for kv_type in args.type:
            print(f"bytes and speed: {kv_type} at {budget:g}", file=sys.stderr, flush=True)
            readers[kv_type] = Reader(model, kv_type, make_plan(args.method, budget), args.tokens, args.threads)
            out[kv_type, budget] = {"bytes": readers[kv_type].cache.stats().bytes}
        for _ in range(args.rounds):
            for kv_type, reader in readers.items():
                cell = out[kv_type, budget]
                cell["tok_s"] = max(cell.get("tok_s", 0.0), 1 / reader.decode(ROUND))
        for reader in readers.values():
            reader.close()
    model.close()
    return out


def table(args: argparse.Namespace) -> list[dict[str, Any]]:
    close, large = fidelity(args), bytes_and_speed(args)
    full = large["f16", 1.0]["bytes"]
    return [
        {
            "type": kv_type, "budget": budget, "bits": 8 * KvType.parse(kv_type).bytes_per_value,
            **close[kv_type, budget],
            "bytes": int(large[kv_type, budget]["bytes"]), "of_full": large[kv_type, budget]["bytes"] / full,
            "tok_s": large[kv_type, budget]["tok_s"],
            "speed": large[kv_type, budget]["tok_s"] / large["f16", budget]["tok_s"],
        }
        for budget, kv_type in itertools.product(BUDGETS, args.type)
    ]  # fmt: skip


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"Prompt of {args.tokens} tokens for bytes and speed; below a budget of 1 method {args.method}.\n")
    print(
        "| type | budget | bits a number | KV bytes / f16 full | KL, nats a token | same top token | tokens/s / f16's |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for r in rows:
        print(f"| {r['type']} | {r['budget']:g} | {r['bits']:g} | {r['of_full']:.4f} | {r['kl']:.5f} | "
              f"{r['top1']:.1%} | {r['speed']:.2f} |")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10, help="of each task (default %(default)s)")
    parser.add_argument("--images", type=int, default=4, help="of the needle tasks (default %(default)s)")
    parser.add_argument("--task", action="append", default=[], choices=TASKS, help="repeatable")
    parser.add_argument("--type", action="append", default=[], help="besides f16; repeatable, also K:V")
    parser.add_argument("--method", default="h2o", help="where the budget is not 1 (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="of decoding (default %(default)s)")
    parser.add_argument("--model", type=Path, default=DATA / "demo-model.gguf", help="for bytes and speed")
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
