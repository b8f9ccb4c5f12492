"""The common parts of the measuring scripts: options, a prompt of text and images, workers, and tables."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401
from llama_source import ROOT

STOCK_LIB = Path(os.environ.get("KVEDGE_STOCK_DIR", ROOT / "build" / "stock" / "lib"))
Piece = tuple[int, bool]  # number of tokens, whether they are an image's


def options(explanation: str | None, images: bool = True) -> argparse.ArgumentParser:
    """Returns a parser with the common options. images: whether the prompt has images."""
    parser = argparse.ArgumentParser(description=explanation, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="GGUF file of the text model")
    add("--tokens", type=int, default=2560, help="prompt length, images included (default %(default)s)")
    if images:
        add("--images", type=int, default=4, help="images in it (default %(default)s)")
        add("--image-tokens", type=int, default=576, help="tokens of each (default %(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
    add("--json", action="store_true")
    return parser


def require(parser: argparse.ArgumentParser, args: argparse.Namespace, stock: bool = True) -> None:
    """Exits with an error if the model, a needed unpatched library, or room for text is missing."""
    if not Path(args.model).is_file():
        parser.error(f"{args.model} is not a file; scripts/make_shape_model.py writes models to measure with")
    if stock and not STOCK_LIB.is_dir():
        parser.error(f"{STOCK_LIB} is missing; python3 scripts/build_stock.py builds the unpatched library")
    if "images" in args and args.tokens - args.images * args.image_tokens < 2:
        taken = f"{args.images} images of {args.image_tokens} tokens"
        parser.error(f"{taken} leave no text in a prompt of {args.tokens} tokens")


def pieces(images: int, image_tokens: int, tokens: int) -> list[Piece]:
    """Returns the pieces of the prompt: a few words, the images, the question."""
    text = tokens - images * image_tokens
    return [(text - text // 2, False), *[(image_tokens, True)] * images, (text // 2, False)]


def chunks(parts: list[Piece], most: int) -> list[list[Piece]]:
    """Cuts a prompt into parts of at most `most` tokens, for a second pass. Images stay whole."""
    out: list[list[Piece]] = [[]]
    left = most
    for n, image in parts:
        while n:
            if out[-1] and (left <= 0 or (image and n > left)):
                out.append([])
                left = most
            taken = n if image else min(n, left)
            out[-1].append((taken, image))
            n, left = n - taken, left - taken
    return out


def libraries(kvedge: bool) -> dict[str, str]:
    """Returns the environment of a process whose bindings load kvedge's llama.cpp, or the unpatched one."""
    stock = {} if kvedge else {"LLAMA_CPP_LIB_PATH": str(STOCK_LIB), "MTMD_CPP_LIB": str(STOCK_LIB)}
    return {**os.environ, **stock}


class Worker:
    """A process with one library. A call blocks until the process answers."""

    def __init__(self, model: str, threads: int, kvedge: bool) -> None:
        command = [sys.executable, str(Path(__file__).with_name("comparison_worker.py")), model]
        command += ["--threads", str(threads), *(["--kvedge"] if kvedge else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=libraries(kvedge)
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit(f"{Path(sys.argv[0]).stem}: a worker ended early; its message is above")
        return json.loads(line)

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()


def show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Prints rows with the same columns, as JSON or as a table."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return

    def cell(value: Any) -> str:
        if isinstance(value, list):
            return " - ".join(map(cell, value))
        if isinstance(value, float):
            return f"{value:.2e}" if 0 < value < 0.01 else f"{value:.2f}"
        return "" if value is None else str(value)

    table = [list(rows[0])] + [[cell(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
