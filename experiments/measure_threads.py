"""Measures the speed of prompt and answer beside other programs, by the number of threads.

    python3 scripts/dev.py python experiments/measure_threads.py MODEL.gguf
    python3 scripts/dev.py python experiments/measure_threads.py MODEL --way now --way 1:OMP_WAIT_POLICY=passive --json

Each way is a process: THREADS, or THREADS:NAME=VALUE,NAME=VALUE with changed variables; 0 threads: kvedge's default.
KVEDGE_LIB_DIR chooses the libraries of another build. All ways take turns several times, beside 0, 1 and 2 busy loops.
Columns: the loops; the way; tokens per second of the prompt and of the answer, medians; each as a share of the best
way's, which is 1; and the processors that other programs used meanwhile. A run in which they used more than a tenth of
a processor is repeated; the least disturbed run counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import scriptpath  # noqa: F401
from llama_source import log
from measuring import show

LOOP = "while True: pass"
SPARE = 0.1  # share of a processor that other programs may use
WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture again. "


@dataclass(frozen=True)
class Run:
    """Tokens per second of a prompt and of its answer, and the processors that other programs used meanwhile."""

    prompt: float
    answer: float
    others: float


class Way:
    """One way to answer: a process that has loaded the model."""

    def __init__(self, text: str, args: argparse.Namespace) -> None:
        self.name = text
        threads, _, variables = text.partition(":")
        environment = dict(v.split("=", 1) for v in variables.split(",") if v)
        command = [sys.executable, __file__, args.model, "--worker", threads]
        command += ["--words", str(args.words), "--seconds", str(args.seconds)]
        self.process = psutil.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.run([])

    def run(self, others: Sequence[psutil.Popen]) -> Run:
        """Answers once beside the loops `others`."""
        began, busy, own = time.perf_counter(), _busy(), _used([self.process, *others])
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"measure_threads: {self.name} ended early; its message is above")
        rest = _busy() - busy - (_used([self.process, *others]) - own)
        run = Run(*json.loads(line), max(rest, 0.0) / (time.perf_counter() - began))
        log(f"{len(others)} {self.name}: {run.prompt:.1f} and {run.answer:.1f} tokens/s, others {run.others:.2f}")
        return run

    def undisturbed(self, others: Sequence[psutil.Popen], tries: int) -> Run:
        """Answers until other programs use at most SPARE, at most `tries` times. Returns the least disturbed run."""
        best = self.run(others)
        for _ in range(tries - 1):
            if best.others <= SPARE:
                break
            best = min(best, self.run(others), key=lambda run: run.others)
        return best

    def end(self) -> None:
        """Ends the process."""
        self.process.communicate()


def _busy() -> float:
    """Returns the processor seconds of all programs."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _used(processes: Sequence[psutil.Popen]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def work(args: argparse.Namespace) -> None:
    """Answers once for each line of stdin."""
    import pykvedge
    from pykvedge.runtime.sampling import Sampling

    with pykvedge.load(args.model, threads=args.worker, prompt_cache=0) as model:
        for _ in sys.stdin:
            with pykvedge.Session(model, plan=pykvedge.plan("full"), threads=args.worker, n_ctx=4096) as session:
                ends = (token for token in range(session.model.n_vocab) if session.model.is_end(token))
                on = Sampling(max_tokens=3000, logit_bias=dict.fromkeys(ends, -math.inf))
                answer = session.ask(WORDS * (args.words // len(WORDS.split())), sampling=on)
                began = time.perf_counter()
                for _ in answer:
                    if time.perf_counter() - began > args.seconds:
                        break
                answer.close()
                took, tokens = answer.report.time, answer.report.tokens
            print(json.dumps([tokens.prompt / took.prefill_s, took.decode_steps / took.decode_s]), flush=True)


@contextlib.contextmanager
def loops(n: int) -> Iterator[list[psutil.Popen]]:
    """Runs n busy loops inside the `with`."""
    others = [psutil.Popen([sys.executable, "-c", LOOP]) for _ in range(n)]
    try:
        yield others
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all ways in turn. Returns a row for each way and each number of loops."""
    ways = [Way(text, args) for text in args.way]
    found: dict[tuple[int, str], list[Run]] = {}
    for turn in range(args.rounds):
        for busy in args.busy:
            with loops(busy) as others:
                time.sleep(0.3)
                for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    found.setdefault((busy, way.name), []).append(way.undisturbed(others, args.tries))
    for way in ways:
        way.end()
    middle = {
        key: Run(*(statistics.median(getattr(run, name) for run in runs) for name in ("prompt", "answer", "others")))
        for key, runs in found.items()
    }
    rows = []
    for (busy, name), run in sorted(middle.items(), key=lambda item: item[0][0]):
        prompt, answer = (max(getattr(middle[busy, way.name], what) for way in ways) for what in ("prompt", "answer"))
        parts = {"prompt_part": run.prompt / prompt, "answer_part": run.answer / answer}
        rows.append(
            {"loops": busy, "way": name, "prompt": run.prompt, "answer": run.answer, **parts, "others": run.others}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="GGUF file of the text model")
    add("--way", action="append", metavar="THREADS[:NAME=VALUE,...]", help="repeatable (default: 1, 2 and 0)")
    add("--busy", type=int, nargs="+", default=[0, 1, 2], help="other programs (default 0 1 2)")
    add("--rounds", type=int, default=3, help="(default %(default)s)")
    add("--tries", type=int, default=5, help="of a run that is disturbed (default %(default)s)")
    add("--words", type=int, default=150, help="of the prompt (default %(default)s)")
    add("--seconds", type=float, default=2.0, help="of an answer, at most (default %(default)s)")
    add("--json", action="store_true")
    add("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not Path(args.model).is_file():
        parser.error(f"{args.model} is not a file; scripts/make_shape_model.py writes models to measure with")
    if args.worker is not None:
        work(args)
        return
    args.way = args.way or ["1", "2", "0"]
    show(measure(args), args.json)


if __name__ == "__main__":
    main()
