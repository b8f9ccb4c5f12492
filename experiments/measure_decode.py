"""Measures how fast decode attention reads keys and values, against a plain sum over the same bytes, in turns.

    python3 scripts/dev.py python experiments/measure_decode.py
    python3 scripts/dev.py python experiments/measure_decode.py --type f16 q8_0 --threads 2
    python3 scripts/dev.py python experiments/measure_decode.py --shape gqa-2x6x128 --kernels avx2 --threads 1 2 --json

A shape is KV heads x query heads for each x head size, with one query token. Medians over rounds; `ratio` is the median
of the rounds' ratios. First builds native/tests/bench_decode.cpp for each kernel table, under build/native.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import scriptpath  # noqa: F401
from llama_source import SourceError, ended
from native_build import build_native

SHAPES = {"mha-16x1x128": (16, 1, 128), "mha-16x1x64": (16, 1, 64), "gqa-2x6x128": (2, 6, 128)}


class Setting(NamedTuple):
    """The settings of one row of the table."""

    kv_type: str
    shape: str
    tokens: int
    threads: int


def measure(program: Path, setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one row of the table. Raises SourceError when the program fails."""
    n_heads_kv, group, size = SHAPES[setting.shape]
    numbers = [n_heads_kv * group, n_heads_kv, size, setting.tokens, setting.threads, args.rounds, args.mib]
    done = subprocess.run([program, *map(str, numbers), setting.kv_type], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = done.stderr.strip() or "this machine may lack its instructions"
        raise SourceError(f"{program} ended with code {done.returncode}: {why}")
    head, *lines = done.stdout.splitlines()
    table, n_bytes, _ = head.split()
    pairs = [tuple(map(float, line.split()))[2 * args.cpu :][:2] for line in lines]
    total, attention = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    return {
        "kernels": table,
        "type": setting.kv_type,
        "shape": setting.shape,
        "tokens": setting.tokens,
        "threads": setting.threads,
        "sum_gb_s": int(n_bytes) / total / 1e9,
        "attention_gb_s": int(n_bytes) / attention / 1e9,
        "ratio": statistics.median(a / b for a, b in pairs),
        "ratio_range": [min(a / b for a, b in pairs), max(a / b for a, b in pairs)],
    }


def show(row: dict[str, Any], first: bool) -> None:
    cells = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values() if not isinstance(v, list)]
    cells.append(" - ".join(f"{v:.2f}" for v in row["ratio_range"]))
    if first:
        print("  ".join(name.ljust(14) for name in row).rstrip())
    print("  ".join(text.ljust(14) for text in cells).rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", action="append", default=[], choices=SHAPES, metavar="SHAPE",
        help=f"repeatable, of {', '.join(SHAPES)} (default: all)")  # fmt: skip
    add("--kernels", action="append", default=[], metavar="TABLE",
        help="repeatable: best (default), generic, avx2, avx512, avx512vnni, neon, neondot, neoni8mm")  # fmt: skip
    add("--type", nargs="+", default=["f16"], help="of keys and values (default f16)")
    add("--tokens", type=int, nargs="+", default=[512, 2048, 8192], help="KV pairs per head (default 512 2048 8192)")
    add("--threads", type=int, nargs="+", default=[1, 2], help="(default 1 2)")
    add("--rounds", type=int, default=15, help="of each row (default %(default)s)")
    add("--mib", type=int, default=192, help="size of the keys and values (default %(default)s: fits no cache)")
    add("--cpu", action="store_true", help="processor time instead of wall time: a busy machine disturbs it less")
    add("--json", action="store_true")
    args = parser.parse_args()
    shapes = args.shape or list(SHAPES)
    rows: list[dict[str, Any]] = []
    for table in args.kernels or ["best"]:
        options = {} if table == "best" else {"KVEDGE_KERNELS": table}
        programs = build_native(table, ["bench_decode"], **options)
        for setting in itertools.starmap(Setting, itertools.product(args.type, shapes, args.tokens, args.threads)):
            rows.append(measure(programs / "bench_decode", setting, args))
            if not args.json:
                show(rows[-1], len(rows) == 1)
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    sys.exit(ended(main))
