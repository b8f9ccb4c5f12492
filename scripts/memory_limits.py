"""Asks the packaged model under one limit of the address space (ulimit -v) after the other.

    .venv/bin/python scripts/memory_limits.py                                  # 200 to 600 MB in steps of 10
    .venv/bin/python scripts/memory_limits.py --from 250 --to 260 --step 1 -- --threads 8 "Hello"

Each run must end with an answer, or with one line on stderr and exit code 1 or 2. What follows -- are options of
`kvedge chat` in place of a question about a picture. Linux and macOS.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from llama_source import ROOT

PICTURE = ("--image", str(ROOT / "examples" / "scene-1.png"), "How many shapes are there?")
PATIENCE_S = 120


@dataclass(frozen=True)
class Run:
    """How a run under a limit ended."""

    code: int
    out: str
    err: str

    @property
    def answered(self) -> bool:
        return self.code == 0 and bool(self.out.strip())

    @property
    def refused(self) -> bool:
        """Tells whether it said one line, and nothing else."""
        lines = self.err.splitlines()
        return self.code in (1, 2) and not self.out and len(lines) == 1 and lines[0].startswith("kvedge: error: ")


def run(limit: int, arguments: Sequence[str] = PICTURE, environment: dict[str, str] | None = None) -> Run:
    """Runs `kvedge chat` with `limit` bytes of address space."""
    import resource

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    done = subprocess.run(
        [sys.executable, "-m", "pykvedge", "chat", *arguments], preexec_fn=bound, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return Run(done.returncode, done.stdout, done.stderr)


def main() -> int:
    """Returns 1 if a run ended in another way."""
    parser = argparse.ArgumentParser(description="Asks the packaged model under limits of the address space.")
    parser.add_argument("--from", dest="first", type=int, default=200, metavar="MB")
    parser.add_argument("--to", dest="last", type=int, default=600, metavar="MB")
    parser.add_argument("--step", type=int, default=10, metavar="MB")
    parser.add_argument("arguments", nargs="*", metavar="OPTION", help="after --: options of kvedge chat")
    given = parser.parse_args()
    counts = {"answered": 0, "refused": 0, "neither": 0}
    for megabytes in range(given.first, given.last + 1, given.step):
        ended = run(megabytes * 10**6, given.arguments or PICTURE, {**os.environ, "PYTHONUTF8": "1"})
        how = "answered" if ended.answered else "refused" if ended.refused else "neither"
        counts[how] += 1
        print(
            f"{megabytes:5d} MB  {how:8s}  {ended.code:4d}  {(ended.err.strip() or '-').splitlines()[-1]}", flush=True
        )
    print(", ".join(f"{n} {how}" for how, n in counts.items()))
    return 1 if counts["neither"] else 0


if __name__ == "__main__":
    sys.exit(main())
