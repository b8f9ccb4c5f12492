"""Measures kvedge serve beside stock llama-server, with clients that leave at random: errors, memory, waits, speed.

    python3 scripts/dev.py python experiments/measure_serve.py --minutes 30 --stock PATH/TO/llama-server

Both servers run at the same time on one model, by default the packaged one. They are asked in turns of --slice seconds,
with one client and with --clients clients, so that other load of the machine affects both. An answer is wrong if it
differs from the same server's earlier answer to the same messages. Private memory is what the system counts for each
process: after its first turns, at its highest since, and at the end.

Methods change the words and the length of answers. With --tokens N each answer has exactly N tokens, because the end
token is forbidden: then both servers do the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import scriptpath  # noqa: F401
from llama_source import ROOT, log
from serve_load import Load, Seen

from pykvedge.models.gguf import read_header

DATA = ROOT / "pykvedge" / "data"
N_CTX = 2048  # tokens of a conversation
WARM = 5  # turns before memory is compared


class Server:
    """A server process, its clients, and their results with one and with many clients."""

    def __init__(self, name: str, process: subprocess.Popen[str], url: str, fields: dict[str, Any]) -> None:
        self.name, self.process, self.load = name, psutil.Process(process.pid), Load(url, fields)
        self.seen: dict[int, list[Seen]] = {}
        self.cpu: Counter[int] = Counter()  # CPU milliseconds, by the number of clients
        self.memory: list[int] = []

    def turn(self, clients: int, seconds: float) -> None:
        before = self._cpu()
        self.seen.setdefault(clients, []).append(asyncio.run(self.load.run(clients, seconds)))
        self.cpu[clients] += self._cpu() - before
        self.memory.append(self.process.memory_full_info().uss)

    def _cpu(self) -> int:
        times = self.process.cpu_times()
        return round(1000 * (times.user + times.system))

    def figures(self, clients: int) -> dict[str, Any]:
        seen = self.seen[clients]
        answers = sorted(s for one in seen for s in one.answers)
        first = sorted(s for one in seen for s in one.first)
        seconds, wrong = sum(one.seconds for one in seen), [w for one in seen for w in one.wrong]
        kept, full = sum(sum(one.kept) for one in seen), sum(sum(one.full) for one in seen)
        return {
            "answers": len(answers),
            "left": sum(one.left for one in seen),
            "wrong": len(wrong),
            "wrong_first": wrong[:3],
            "tokens_per_s": round(sum(one.tokens for one in seen) / seconds, 1),
            "characters_per_s": round(sum(one.characters for one in seen) / seconds, 1),
            "answers_per_s": round(len(answers) / seconds, 2),
            "cpu_ms_per_answer": round(self.cpu[clients] / max(len(answers), 1), 2),
            "first_token_p50_s": round(statistics.median(first), 4),
            "answer_p50_s": round(statistics.median(answers), 4),
            "answer_p99_s": round(answers[int(0.99 * (len(answers) - 1))], 4),
            "kv_kept_of_full": round(kept / full, 3) if full else None,
        }

    def grown(self) -> dict[str, float]:
        after = self.memory[WARM:] or self.memory
        return {f"private_{name}_mib": round(n / (1 << 20), 1)
                for name, n in (("warm", after[0]), ("most", max(after)), ("end", after[-1]))}  # fmt: skip


@contextlib.contextmanager
def running(name: str, command: list[str], url: str, fields: dict[str, Any] | None = None) -> Iterator[Server]:
    """Yields a server when it answers; ends it afterwards. fields: of every request."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    )
    try:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    break
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{name} does not answer: {' '.join(command)}")
            time.sleep(0.2)
        yield Server(name, process, url, fields or {})
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def commands(args: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    files, both = ["--model", str(args.model), "--mmproj", str(args.mmproj)], ["--threads", str(args.threads)]
    out = {}
    port = str(free_port())
    bounds = ["--ctx", str(N_CTX), "--parallel", str(args.clients), "--memory", args.memory]
    ours = [sys.executable, "-m", "pykvedge", "serve", *files, *both, "--port", port, *bounds]
    ours += ["--method", args.method, "--budget", str(args.budget)]
    out["kvedge"] = (ours, f"http://127.0.0.1:{port}")
    if args.stock:
        port = str(free_port())
        stock = [
            args.stock,
            *files,
            *both,
            "--port",
            port,
            "-np",
            str(args.clients),
            "-c",
            str(N_CTX * args.clients),
            "--jinja",
        ]
        out["stock"] = (stock, f"http://127.0.0.1:{port}")
    return out


def exactly(model: Path, tokens: int) -> dict[str, Any]:
    """Returns the request fields that give an answer of exactly this number of tokens."""
    ends = read_header(model).values["tokenizer.ggml.eos_token_id"]
    return {"max_tokens": tokens, "logit_bias": {str(ends): -100}}


def show(servers: list[Server], clients: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        one.name: {"one": one.figures(1), "many": one.figures(clients), **one.grown()} for one in servers
    }
    if len(servers) == 2:
        ours, stock = (out[one.name] for one in servers)
        names = (
            "tokens_per_s",
            "characters_per_s",
            "answers_per_s",
            "cpu_ms_per_answer",
            "answer_p50_s",
            "answer_p99_s",
        )
        out["ratio"] = {k: {name: round(ours[k][name] / stock[k][name], 3) for name in names} for k in ("one", "many")}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--slice", type=float, default=20, help="seconds of a turn (default %(default)s)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--stock", metavar="PROGRAM", help="a llama-server of the pinned llama.cpp; without it kvedge alone"
    )
    parser.add_argument("--model", type=Path, default=DATA / "demo-model.gguf")
    parser.add_argument("--mmproj", type=Path, default=DATA / "demo-mmproj.gguf")
    parser.add_argument("--method", default="lookm")
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--memory", default="16MiB", help="of kvedge (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="of every answer (default: as many as the model says)")
    args = parser.parse_args()
    if args.stock and not Path(args.stock).is_file():
        parser.error(f"{args.stock} is no file; build the target llama-server of the pinned source")
    with contextlib.ExitStack() as stack:
        fields = exactly(args.model, args.tokens) if args.tokens else {}
        servers = [stack.enter_context(running(name, *how, fields)) for name, how in commands(args).items()]
        end, turn = time.monotonic() + 60 * args.minutes, 0
        while time.monotonic() < end:
            clients = 1 if turn % 4 == 0 else args.clients
            for one in servers if turn % 2 else servers[::-1]:
                one.turn(clients, args.slice)
            turn += 1
            log(f"{max(end - time.monotonic(), 0) / 60:.1f} minutes left; MiB: "
                + ", ".join(f"{one.name} {one.memory[-1] / (1 << 20):.1f}" for one in servers))  # fmt: skip
        if not all(args.clients in one.seen for one in servers):
            parser.error("--minutes leaves no turn with many clients")
        print(json.dumps(show(servers, args.clients), indent=1))


if __name__ == "__main__":
    main()
