"""Measures the cost of compression, per method, as a share of the prompt's time: one run, with alternating methods.

    python3 scripts/dev.py python experiments/measure_overhead.py MODEL.gguf
    python3 scripts/dev.py python experiments/measure_overhead.py MODEL --method flashcache --method h2o+match --json

MODEL is a text model of the shape in question (scripts/make_shape_model.py llava-1.4b -o DIR writes one). The prompt is
images, which come as embeddings, and text. Costs: (1) what a method gathers during the prompt (column sums, the last
queries), measured piece by piece against `full`, which gathers nothing; (2) the compression of copies of the finished
prompt; (3) the second pass of methods that read the prompt twice (kvzip). Methods that gather the same data share a
prompt. Profiles are random. NAME+REDUCER is a method with another reducer. Columns: shares of the time of full's
prefill in percent, then of unpatched llama.cpp's (with --stock); medians.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import scriptpath  # noqa: F401
from comparison_worker import composed
from llama_source import log
from measuring import Worker, options, pieces, require, show

import pykvedge
from pykvedge.errors import KvedgeError


def gathering(method: str) -> str:
    """Returns a key. Methods with the same key gather the same data during the prompt."""
    plan = composed(method, 0.2)
    queries = "and queries" if plan.allocator == "entropy" else ""
    scorer = "window" if plan.scorer in ("mixkv", "modal") else plan.scorer  # all use the last queries
    source = plan.settings("scorer").get("source", "")
    fits = "and those to fit" if plan.reducer == "match" else ""
    return " ".join(f"{scorer} {plan.params.get('scorer.window', '')} {source} {queries} {fits}".split())


def measurable() -> list[str]:
    """Returns all methods, and a method with the reducer that uses queries."""
    return [*(m for m in pykvedge.methods() if m != "full"), "snapkv+match"]


def known(text: str) -> str:
    """Returns the name of a method. Raises ArgumentTypeError for an unknown method."""
    try:
        composed(text, 0.2)
    except KvedgeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


class Overhead:
    """Collects times. All prompts and compressions of a round alternate."""

    def __init__(self, args: argparse.Namespace, ours: Worker, stock: Worker | None) -> None:
        self.args, self.ours, self.stock = args, ours, stock
        self.groups = {"full": "full", **{gathering(m): m for m in args.method}}  # one method for each group
        self.prompts: dict[str, list[float]] = {}
        self.compressions: dict[str, list[float]] = {m: [] for m in args.method}
        self.again: dict[str, list[float]] = {m: [] for m in args.method}
        self.clock = "cpu_seconds" if args.cpu else "seconds"
        self.parts = pieces(args.images, args.image_tokens, args.tokens)

    def open(self, group: str) -> None:
        worker = self.stock if group == "stock" and self.stock else self.ours
        method = None if group == "stock" else self.groups[group]
        worker.call("open", name=group, n_ctx=self.args.tokens + 8, method=method, budget=self.args.budget,
                    copies=group != "stock")  # fmt: skip

    def prefill(self, turn: int) -> list[str]:
        """Decodes the prompt in every group, piece by piece. Returns the groups that gather data, and full."""
        groups = [*self.groups, *(["stock"] if self.stock else [])]
        if turn:
            groups = [g for g in groups if g in self.prompts]
        for group in groups:
            self.open(group)
        seconds = dict.fromkeys(groups, 0.0)
        for i, (n, image) in enumerate(self.parts):
            order = groups[i % len(groups) :] + groups[: i % len(groups)]
            for group in order:
                worker = self.stock if group == "stock" and self.stock else self.ours
                done = worker.call("part", name=group, n=n, image=image, seed=100 * turn + i)
                seconds[group] += done[self.clock]
                if not done["score_bytes"] and group not in ("full", "stock"):
                    log(f"{group}: gathers nothing, so its prompt is that of full")
                    worker.call("close", name=group)
                    groups.remove(group)
        for group in groups:
            self.prompts.setdefault(group, []).append(seconds[group])
        return groups

    def round(self, turn: int) -> None:
        log(f"prompts {turn + 1} of {self.args.rounds}")
        groups = self.prefill(turn)
        for again in range(self.args.compressions):
            log(f"compressions {again + 1} of {self.args.compressions}")
            for method in self.args.method:
                name = gathering(method) if gathering(method) in groups else "full"
                how = {"method": method, "budget": self.args.budget, "parts": self.parts}
                done = self.ours.call("compress_copy", name=name, **how)
                self.compressions[method].append(done[self.clock])
                self.again[method].append(done[f"again_{self.clock}"])
        for group in groups:
            worker = self.stock if group == "stock" and self.stock else self.ours
            worker.call("close", name=group)

    def rows(self) -> list[dict[str, Any]]:
        full = self.prompts["full"]
        base = statistics.median(full)
        rows = []
        for method in self.args.method:
            own = self.prompts.get(gathering(method), full)
            extra = statistics.median([(a - b) / b for a, b in zip(own, full, strict=True)])
            took, again = (statistics.median(times[method]) for times in (self.compressions, self.again))
            row = {
                "method": method,
                "prefill_full_s": base,
                "gather_percent": 100 * extra,
                "compress_s": took,
                "compress_percent": 100 * took / base,
                "again_percent": 100 * again / base,
                "total_percent": 100 * (extra + (again + took) / base),
            }
            if self.stock:
                stock = statistics.median(self.prompts["stock"])
                row["total_percent_of_stock"] = 100 * (base * extra + again + took) / stock
                row["full_vs_stock"] = base / stock
            rows.append(row)
        return rows


def main() -> None:
    parser = options(__doc__)
    add = parser.add_argument
    add("--method", action="append", default=[], type=known, metavar="NAME",
        help="repeatable (default: all, and snapkv+match)")  # fmt: skip
    add("--budget", type=float, default=0.2)
    add("--rounds", type=int, default=3, help="prompts of each kind (default %(default)s)")
    add("--compressions", type=int, default=3, help="of each method and prompt (default %(default)s)")
    add("--cpu", action="store_true",
        help="processor time instead of wall time; with --threads 1 a busy machine hardly disturbs it")  # fmt: skip
    add("--stock", action="store_true", help="time unpatched llama.cpp too")
    args = parser.parse_args()
    args.method = args.method or measurable()
    require(parser, args, args.stock)
    if min(args.rounds, args.compressions) < 1:
        parser.error("--rounds and --compressions must be at least 1")
    stock = Worker(args.model, args.threads, kvedge=False) if args.stock else None
    ours = Worker(args.model, args.threads, kvedge=True)
    try:
        overhead = Overhead(args, ours, stock)
        for turn in range(args.rounds):
            overhead.round(turn)
        show(overhead.rows(), args.json)
    finally:
        ours.end()
        if stock:
            stock.end()


if __name__ == "__main__":
    main()
