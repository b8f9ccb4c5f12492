"""Measures a second question with whole rows: seconds against the full cache, and against reading all again.

    python3 scripts/dev.py python experiments/measure_keep.py models/llava-1.4b/model.gguf --tokens 2560 8192
    python3 scripts/dev.py python experiments/measure_keep.py models/llava-1.4b/model.gguf --method kvedge --json

One sequence reads a random prompt. Copies of it answer with the full cache, with whole rows in memory, and with whole
rows in a file that is in the page cache. A round is a question, its first token, and an answer. The first --before
tokens of the answer stay, and are read again with the next question, as in a session. The fastest round counts, without
the first. `again` is the first reading of the prompt and its compression. At the end, prints the memory of the process
during an answer from compressed rows, with whole rows in the file and then without whole rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import options, require

from kvedge_lab.progress import Steps
from pykvedge.cli.tables import markdown
from pykvedge.errors import KvedgeError
from pykvedge.models.model import Model
from pykvedge.models.profiles import tables_for
from pykvedge.models.vision import TextPiece
from pykvedge.plans.making import default_plan, plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import DEFAULT_METHOD
from pykvedge.runtime.driver import Driver
from pykvedge.runtime.llama_context import ContextSize, ubatch_for
from pykvedge.runtime.loaded import borrow
from pykvedge.runtime.sequence import Sequence
from pykvedge.runtime.settings import Settings

FULL, RAM, DISK, ROUNDED, AGAIN = "full", "keep ram", "keep disk", "keep disk q8_0", "again"
SPARE = 64
MEMORY_HEAD = ["method", "tokens", "", "private MiB", "file pages MiB", "KV MiB", "whole rows MiB", "in the file"]


class Talk:
    """One context that has read a prompt. Copies of the prompt are asked."""

    def __init__(self, model: Model, chosen: Plan, args: argparse.Namespace, n: int, folder: str) -> None:
        self.args, self.plan, self._folder = args, chosen, folder
        self._clock = time.thread_time if args.cpu else time.perf_counter
        self._random = np.random.default_rng(n)
        self._n_vocab = model.n_vocab
        rounds = 2 * args.rounds + 4
        n_ctx = n + 4 * (rounds * (args.before + args.question) + args.answer + SPARE)
        size = ContextSize(n_ctx, ubatch_for(None, 0), "f16", n, n_seq=4)
        self._driver = Driver(model, None, size, args.threads)
        self._driver.take_over(chosen, tables_for(chosen, model.path))
        self._tables = tables_for(chosen, model.path)
        self._whole = Sequence(self._driver, 0)
        self._prompt = self.tokens(n)

    def close(self) -> None:
        self._driver.close()

    def tokens(self, n: int) -> list[int]:
        return [int(t) for t in self._random.integers(self._n_vocab // 3, self._n_vocab, n)]

    @property
    def cache(self) -> Any:
        return self._driver.cache

    def read(self) -> float:
        """Reads the prompt and compresses a copy. Returns the seconds of both."""
        began = self._clock()
        self._whole.read([TextPiece(self._prompt)])
        self._driver.context.logits()
        read = self._clock() - began
        copy = Sequence(self._driver, 1)
        copy.follow(self._whole)
        began = self._clock()
        copy.compress()
        read += self._clock() - began
        copy.drop()
        return read

    def ask(self, how: str) -> dict[str, Any]:
        """Asks a copy of the prompt in several rounds. Returns the fastest round by step."""
        keep = {FULL: "", RAM: "ram", DISK: "disk", ROUNDED: "disk"}[how]
        self.cache.set_plan(plan("full") if how == FULL else self.plan, None if how == FULL else self._tables)
        kv_type, self._element = ("q8_0", 34 / 32) if how == ROUNDED else ("f16", 2.0)
        self.cache.keep(keep, self._folder if keep == "disk" else "", kv_type=kv_type)
        one = Sequence(self._driver, 1)
        one.follow(self._whole)
        one.compress()
        self.answer(one, self.args.before)
        rounds = [self.round(one, keep == "disk") for _ in range(self.args.rounds + 1)][1:]
        best = min(rounds, key=lambda r: r["whole answer"])
        stats = self.cache.stats(1)
        one.drop()
        return {**best, "whole_bytes": stats.whole_bytes, "whole_file_bytes": stats.whole_file_bytes}

    def round(self, one: Sequence, in_file: bool) -> dict[str, float]:
        """Asks a question in a sequence that has an answer. Returns seconds by step."""
        args = self.args
        self.shorten(one, len(one.answered) - args.before)
        self.settled(one, in_file)
        marks = [self._clock()]
        one.read([TextPiece(self.tokens(args.question))])
        self._driver.context.logits()
        marks.append(self._clock())
        one.compress()
        marks.append(self._clock())
        self.answer(one, args.answer)
        marks.append(self._clock())
        read, compress, answer = np.diff(marks).tolist()
        return {"read": read, "compress": compress, "answer": answer, "first token": read + compress,
                "whole answer": read + compress + answer}  # fmt: skip

    def answer(self, one: Sequence, n: int) -> None:
        for token in self.tokens(n):
            one.extend(token)
            self._driver.context.logits()

    def shorten(self, one: Sequence, n: int) -> None:
        """Removes the last n tokens of an answer."""
        one.n_past, one.n_cells = one.n_past - n, one.n_cells - n
        self._driver.context.cut(one.number, one.n_past)
        del one.answered[len(one.answered) - n :]

    def settled(self, one: Sequence, in_file: bool) -> None:
        """Waits until the file has all whole rows: a user takes longer to ask."""
        until = time.monotonic() + 300
        while in_file and time.monotonic() < until:
            stats = self.cache.stats(one.number)
            per_token = stats.n_layers * stats.n_heads_kv * self._driver.model.pair_width * self._element
            if stats.whole_file_bytes >= per_token * (stats.n_tokens - len(one.answered)):
                return
            time.sleep(0.2)
            self.answer(one, 1)  # a decode learns what was written
            self.shorten(one, 1)

    def memory(self) -> dict[str, dict[str, int]]:
        """Returns the memory during answers: with whole rows in a file, and after a message without whole rows."""
        one = self._whole  # now the only sequence, so no rows are shared
        out: dict[str, dict[str, int]] = {}
        self.cache.set_plan(self.plan, self._tables)
        self.cache.keep("disk", self._folder)
        self._element = 2.0
        for i, name in enumerate((DISK, f"{DISK}, second answer", "compressed only")):
            if i:
                one.read([TextPiece(self.tokens(self.args.question))])
            if i == 2:
                self.cache.keep("")
            one.compress()
            self.answer(one, self.args.before)
            self.settled(one, i < 2)
            self.answer(one, self.args.before)
            gc.collect()
            stats = self.cache.stats(0)
            out[name] = {**resident(), "kv_bytes": stats.bytes, "whole_bytes": stats.whole_bytes,
                         "whole_file_bytes": stats.whole_file_bytes}  # fmt: skip
        return out


def resident() -> dict[str, int]:
    """Returns the private (RssAnon) and file-backed (RssFile) resident bytes of the process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    return {name: found[name] for name in ("RssAnon", "RssFile")}


def measure(model: Model, args: argparse.Namespace, method: str, n: int) -> dict[str, Any]:
    chosen = default_plan(args.budget) if method == DEFAULT_METHOD else plan(method, args.budget)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        talk = Talk(model, chosen, args, n, folder)
        try:
            out: dict[str, Any] = {"method": method, "tokens": n, AGAIN: talk.read()}
            for how in (FULL, RAM, DISK, ROUNDED):
                out[how] = talk.ask(how)
                print(how, out[how], file=sys.stderr, flush=True)
            out["memory"] = talk.memory()
        finally:
            talk.close()
    return out


def tables(rows: list[dict[str, Any]]) -> str:
    head = ["method", "tokens", "", "first token s", "read s", "compress s", "answer s", "whole answer s",
            "first token / full", "whole answer / full", "reading again / first token"]  # fmt: skip
    out, kept = [head], [MEMORY_HEAD]
    for row in rows:
        full = row[FULL]
        for how in (FULL, RAM, DISK, ROUNDED):
            r = row[how]
            steps = [r[k] for k in ("first token", "read", "compress", "answer", "whole answer")]
            ratios = [r[k] / full[k] for k in ("first token", "whole answer")] + [row[AGAIN] / r["first token"]]
            names = [f"`{row['method']}`", str(row["tokens"]), how]
            out.append([*names, *(f"{s:.3f}" for s in steps), *(f"{x:.2f}" for x in ratios)])
        out.append([*names[:2], "reading again", f"{row[AGAIN]:.1f}", *[""] * 7])
        for name, m in row["memory"].items():
            kept.append([*names[:2], name, *(f"{v / 2**20:.1f}" for v in m.values())])
    return f"{markdown(out)}\n\n{markdown(kept)}"


def main() -> None:
    parser = options(__doc__, images=False)
    parser.set_defaults(tokens=None)
    for action in parser._actions:
        if action.dest == "tokens":
            action.nargs, action.default, action.help = "+", [2560, 8192], "prompt lengths (default 2560 8192)"
    add = parser.add_argument
    add("--method", nargs="+", default=["snapkv", DEFAULT_METHOD])
    add("--budget", default="0.2")
    add("--question", type=int, default=12, help="tokens of a later question (default %(default)s)")
    add("--before", type=int, default=5, help="tokens of the answer before it (default %(default)s)")
    add("--answer", type=int, default=32, help="tokens that are answered (default %(default)s)")
    add("--rounds", type=int, default=3, help="of which the fastest counts (default %(default)s)")
    add("--cpu", action="store_true", help="processor time of one thread instead of wall time, for a busy machine")
    add("--folder", help="where the file of whole rows lies (default: the system's for temporary files)")
    args = parser.parse_args()
    if args.cpu:
        args.threads = 1
    require(parser, args, stock=False)
    loan = borrow(Path(args.model), None, Settings(threads=args.threads), Steps(enabled=False), threading.Event())
    rows = []
    try:
        for n in args.tokens:
            for method in args.method:
                rows.append(measure(loan.model, args, method, n))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        loan.give_back()
    print(json.dumps(rows, indent=1) if args.json else tables(rows))


if __name__ == "__main__":
    try:
        main()
    except KvedgeError as error:
        sys.exit(f"error: {error}")
