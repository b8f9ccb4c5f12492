"""Measures the speed of exact answers beside the full cache, with a forced acceptance of drafts.

    python3 scripts/dev.py python experiments/measure_exact.py models/llava-1.4b/model.gguf --tokens 2560 8192
    python3 scripts/dev.py python experiments/measure_exact.py MODEL --method snapkv --budget 0.2 --acceptance 1 0.9
    python3 scripts/dev.py python experiments/measure_exact.py MODEL --stock

One context reads a random prompt; the full cache answers in a copy of it. Rounds take turns: tokens of the full cache,
drafts with the compressed rows, verifications of several sizes; the median of each counts. Then answers are drafted for
each acceptance, with the number of guesses that the medians favour. The number of accepted guesses follows the
probability, with quantiles in random order, so that few steps have the right mean. The full cache answers in between.
`ratio` is of tokens per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scriptpath  # noqa: F401
from llama_source import log
from measuring import Worker, require

from pykvedge.cli.tables import markdown
from pykvedge.models.model import Model
from pykvedge.models.profiles import tables_for
from pykvedge.models.vision import TextPiece
from pykvedge.plans.making import plan
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import ContextSize
from pykvedge.runtime.loaded import borrow
from pykvedge.runtime.sequence import Sequence
from pykvedge.runtime.settings import Settings

SIZES = (1, 2, 4, 8, 12, 16, 24, 32)


class Talk:
    """A prompt: read, compressed with whole rows, and a copy with the full cache."""

    def __init__(self, model: Model, n: int, args: argparse.Namespace) -> None:
        chosen = plan(args.method, args.budget)
        self.clock = time.thread_time if args.cpu else time.perf_counter
        self._random, self._n_vocab = np.random.default_rng(n), model.n_vocab
        room = args.rounds * 40 + len(args.acceptance) * args.steps * 40
        size = ContextSize(2 * n + 2 * room, 512, "f16", n, n_seq=2, n_outputs=max(SIZES))
        self.driver = Driver(model, None, size, args.threads)
        self.driver.take_over(chosen, tables_for(chosen, model.path))
        cache = self.driver.cache
        assert cache is not None
        cache.keep("ram")
        cache.set_sequence_plan(1, plan("full"))
        self.exact, self.full = Sequence(self.driver, 0), Sequence(self.driver, 1)
        self.exact.read([TextPiece(self.tokens(n))])
        self.full.follow(self.exact)
        self.exact.compress()
        self.full.compress()

    def tokens(self, n: int) -> list[int]:
        return [int(t) for t in self._random.integers(3, self._n_vocab, n)]

    def timed(self, step: Callable[[], None]) -> float:
        began = self.clock()
        step()
        self.driver.context.logits()
        return self.clock() - began

    def one(self) -> float:
        """Decodes a token with the full cache. Returns the seconds."""
        return self.timed(lambda: self.full.extend(self.tokens(1)[0]))

    def draft(self) -> float:
        return self.timed(lambda: self.exact.draft(self.tokens(1)[0]))

    def verify(self, n: int, stay: int) -> float:
        def run() -> None:
            self.exact.verify(self.tokens(n), whole=True)
            self.driver.context.logits()
            self.exact.accept(stay)

        began = self.clock()
        run()
        return self.clock() - began


def medians(talk: Talk, rounds: int) -> tuple[float, float, dict[int, float]]:
    """Returns the seconds of a full-cache token, of a draft token, and of verifications by their size."""
    full, drafts, batches = list[float](), list[float](), {n: list[float]() for n in SIZES}
    for _ in range(rounds):
        full += [talk.one() for _ in range(4)]
        drafts += [talk.draft() for _ in range(4)]
        for n in SIZES:
            batches[n].append(talk.verify(n, 1))
    return statistics.median(full), statistics.median(drafts), {n: statistics.median(t) for n, t in batches.items()}


def best(rate: float, draft: float, batches: dict[int, float]) -> int:
    """Returns the number of guesses with the most expected tokens per second."""
    sizes = np.arange(1, max(SIZES) + 1)
    seconds = np.interp(sizes, list(batches), list(batches.values())) + (sizes - 1) * draft
    tokens = np.cumsum(rate ** (sizes - 1))
    return int((tokens / seconds).argmax())


def stays(rate: float, guesses: int, steps: int, rng: np.random.Generator) -> list[int]:
    """Returns how many guesses are accepted in each step: quantiles of independent acceptance, in random order."""
    at_least = rate ** np.arange(1, guesses + 1)
    return [int((at_least > quantile).sum()) for quantile in rng.permutation((np.arange(steps) + 0.5) / steps)]


def answer(talk: Talk, stock: Worker | None, rate: float, guesses: int, steps: int) -> tuple[float, float, float]:
    """Answers with `guesses` in each step. Returns tokens per second of: this, the full cache, stock."""
    spent, tokens, full, others = 0.0, 0, list[float](), list[float]()
    for right in stays(rate, guesses, steps, talk._random):
        spent += sum(talk.draft() for _ in range(guesses)) + talk.verify(guesses + 1, right + 1)
        tokens += right + 1
        full += [talk.one() for _ in range(2)]
        others += stock.call("generate", name="stock", n=2, seed=tokens)["seconds"] if stock else []
    return tokens / spent, 1 / statistics.mean(full), 1 / statistics.mean(others) if stock else 0.0


def stock_side(args: argparse.Namespace, n: int) -> Worker:
    """Starts a process with unpatched llama.cpp that has read n tokens."""
    worker = Worker(args.model, args.threads, kvedge=False)
    worker.call("open", name="stock", n_ctx=n + 4 * len(args.acceptance) * args.steps, method=None, budget=0)
    worker.call("prefill", name="stock", n=n, seed=n)
    return worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="GGUF file of the text model")
    add("--tokens", type=int, nargs="+", default=[2560, 8192])
    add("--method", default="snapkv")
    add("--budget", default="0.2")
    add("--acceptance", type=float, nargs="+", default=[1.0, 0.97, 0.9])
    add("--threads", type=int, default=0)
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=12, help="of each acceptance")
    add("--cpu", action="store_true", help="processor time of one thread, for a machine that does other work")
    add("--stock", action="store_true", help="beside unpatched llama.cpp (scripts/build_stock.py builds it)")
    add("--json", action="store_true")
    args = parser.parse_args()
    require(parser, args, args.stock)
    if args.stock and args.cpu:
        parser.error("--stock is measured by the clock; leave --cpu out")
    args.threads = 1 if args.cpu else args.threads
    loan = borrow(args.model, None, Settings(threads=args.threads), lambda *_: None, None)
    args.threads = args.threads or loan.threads
    rows: list[dict[str, Any]] = []
    for n in args.tokens:
        log(f"reading {n} tokens")
        talk = Talk(loan.model, n, args)
        talk.verify(2, 1)
        full, draft, batches = medians(talk, args.rounds)
        log(f"full {full * 1e3:.1f} ms, draft {draft * 1e3:.1f} ms, verification "
            + ", ".join(f"{size}: {seconds * 1e3:.0f}" for size, seconds in batches.items()))  # fmt: skip
        stock = stock_side(args, n) if args.stock else None
        for rate in args.acceptance:
            guesses = best(rate, draft, batches)
            speed, beside, other = answer(talk, stock, rate, guesses, args.steps)
            rows.append({
                "tokens": n, "acceptance": rate, "guesses": guesses, "full tok/s": round(beside, 2),
                "exact tok/s": round(speed, 2), "to full": round(speed / beside, 2), "stock tok/s": round(other, 2),
                "to stock": round(speed / other, 2) if stock else None, "full ms": round(full * 1e3, 1),
                "draft ms": round(draft * 1e3, 1),
                "verification ms": {size: round(seconds * 1e3, 1) for size, seconds in batches.items()},
            })  # fmt: skip
        talk.driver.close()
        if stock:
            stock.end()
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        heads = [name for name in rows[0] if name != "verification ms"]
        print(markdown([heads, *[[str(row[name]) for name in heads] for row in rows]]))


if __name__ == "__main__":
    main()
