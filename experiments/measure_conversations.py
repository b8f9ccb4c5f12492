"""Compares many conversations on one server in bounded memory with each conversation alone: are the tokens the same?

    python3 scripts/dev.py python experiments/measure_conversations.py MODEL.gguf MMPROJ.gguf --memory 1GiB

Each conversation has several images. All conversations begin first, --clients at a time. Then each gets a second
message, so that those that waited longest come back from the folder. Then a separate session repeats each conversation
alone, with the same model, plan and pictures. Random weights give nonsense, but greedy tokens can still be compared.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import scriptpath  # noqa: F401
from llama_source import log
from serve_load import SCENES, picture

import pykvedge

WORDS = (
    "red",
    "blue",
    "green",
    "one",
    "two",
    "circle",
    "square",
    "left",
    "right",
    "top",
    "code",
    "shape",
    "which",
    "where",
)


def asked(number: int) -> tuple[list[str], list[str]]:
    """Returns four pictures in a random order, and two messages of a conversation."""
    chance = random.Random(number)
    return chance.sample(SCENES, len(SCENES)), [" ".join(chance.choices(WORDS, k=12)) + "?" for _ in range(2)]


def content(paths: list[str], text: str) -> list[dict[str, Any]]:
    return [*map(picture, paths), {"type": "text", "text": text}]


class Served:
    """A running server, and the largest values of its memory."""

    def __init__(self, args: argparse.Namespace) -> None:
        files = ["--model", args.model, "--mmproj", args.mmproj]
        bounds = [
            "--ctx",
            str(args.ctx),
            "--memory",
            args.memory,
            "--parallel",
            str(args.clients),
            "--park-size",
            "64GiB",
        ]
        what = ["--method", args.method, "--budget", str(args.budget), "--image-tokens", str(args.image_tokens)]
        command = [sys.executable, "-m", "pykvedge", "serve", "--port", "0", "--quiet", *files, *bounds, *what]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            sys.exit("the server did not begin; its message is above")
        self.url, self.tokens = json.loads(line)["url"], args.tokens
        self.most_held = self.most_private = self.folder = 0

    def ask(self, messages: list[dict[str, Any]]) -> tuple[str, int]:
        body = json.dumps({"messages": messages, "temperature": 0, "max_tokens": self.tokens}).encode()
        with urllib.request.urlopen(f"{self.url}/v1/chat/completions", data=body, timeout=3600) as answer:
            told = json.load(answer)
        self.look()
        return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

    def look(self) -> None:
        with urllib.request.urlopen(f"{self.url}/v1/kvedge/memory", timeout=60) as answer:
            now = json.load(answer)
        self.most_held = max(self.most_held, now["kv_bytes"] + now["parked_bytes"])
        self.folder = max(self.folder, now["folder_bytes"])
        self.most_private = max(self.most_private, psutil.Process(self.process.pid).memory_full_info().uss)


def side_by_side(server: Served, args: argparse.Namespace) -> list[list[str]]:
    """Returns both answers of every conversation."""
    talks: list[list[dict[str, Any]]] = [[] for _ in range(args.conversations)]

    def turn(number: int, i: int) -> tuple[str, int]:
        paths, texts = asked(number)
        said = texts[i] if i else content(paths, texts[0])
        talks[number].append({"role": "user", "content": said})
        text, reused = server.ask(talks[number])
        talks[number].append({"role": "assistant", "content": text})
        log(f"conversation {number + 1}, message {i + 1}: {reused} tokens not read again")
        return text, reused

    out: list[list[str]] = [[] for _ in talks]
    with ThreadPoolExecutor(args.clients) as pool:
        for i in range(2):
            for texts, (text, reused) in zip(
                out, pool.map(lambda n, i=i: turn(n, i), range(args.conversations)), strict=True
            ):
                texts.append(text)
                if i and not reused:
                    sys.exit("a conversation was read again")
    return out


def alone(args: argparse.Namespace) -> list[list[str]]:
    plan = pykvedge.plan(args.method, float(args.budget), image_tokens=float(args.image_tokens))
    sampling = pykvedge.Sampling(max_tokens=args.tokens, temp=0)
    out = []
    with pykvedge.load(args.model, args.mmproj) as model:
        for number in range(args.conversations):
            paths, texts = asked(number)
            text = "<image>\n" * len(paths) + texts[0]
            with pykvedge.Session(model, plan=plan, n_ctx=args.ctx) as session:
                out.append([session.ask(text, paths, sampling).read(), session.ask(texts[1], (), sampling).read()])
            log(f"conversation {number + 1} alone")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model")
    add("mmproj")
    add("--conversations", type=int, default=32)
    add("--clients", type=int, default=2, help="at the same time (default %(default)s)")
    add("--memory", default="1GiB")
    add("--method", default="lookm")
    add("--budget", default="0.2")
    add("--image-tokens", default="1.0")
    add("--tokens", type=int, default=8, help="of an answer (default %(default)s)")
    add("--ctx", type=int, default=4096)
    args = parser.parse_args()
    began, server = time.monotonic(), Served(args)
    try:
        together = side_by_side(server, args)
    finally:
        server.process.terminate()
        server.process.wait(120)
    seconds = time.monotonic() - began
    apart = alone(args)
    same = sum(a == b for a, b in zip(together, apart, strict=True))
    found = {"kv_most": server.most_held, "private_most": server.most_private, "folder_most": server.folder}
    mib = {name: round(n / (1 << 20), 1) for name, n in found.items()}
    print(json.dumps({"conversations": len(apart), "same_as_alone": same, "mib": mib, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
