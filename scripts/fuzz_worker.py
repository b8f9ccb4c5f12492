"""Answers with files that are named on stdin, one a line: `fuzz_worker.py KIND FOLDER`, for fuzz_files.py.

A line for each says `ran KIB`, `refused KIB reason` or `raised KIB what`: KIB is the most memory that was held so far.
FOLDER holds the files as they are right, which what is tried is used with.
"""

from __future__ import annotations

import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pykvedge
from pykvedge.cli.options import read_plan
from pykvedge.errors import KvedgeError, one_line
from pykvedge.library import arrays
from pykvedge.models.images import load_picture
from pykvedge.plans import profile
from pykvedge.runtime.sampling import Sampling

MOST_DATA = 4 << 30  # bytes: what asks for more is refused by the system, lest this machine runs out
ONE = Sampling(max_tokens=1)


def answer(model: Path, mmproj: Path | None, pictures: list[Path]) -> None:
    with pykvedge.Session(model, mmproj, pykvedge.plan("full"), threads=1, n_ctx=256) as session:
        session.ask("What is this?", pictures, ONE).read()


def tried(kind: str, folder: Path) -> Callable[[Path], None]:
    """What is done with a file of the kind."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 4, 40, 32)), rng.standard_normal((2, 2, 40, 32))
    if kind == "model":
        return lambda file: answer(file, None, [])
    if kind == "mmproj":
        return lambda file: answer(folder / "model", file, [folder / "image"])
    if kind == "session":
        session = pykvedge.Session(folder / "model", None, pykvedge.plan("lookm", 0.5), threads=1)

        def go_on(file: Path) -> None:
            session.load(file)
            session.ask("And?", [], ONE).read()

        return go_on
    if kind == "plan":
        return lambda file: void(arrays.compress(read_plan(file), q, k, k, threads=1))
    if kind == "profile":
        plan = pykvedge.plan("knorm", 0.5, allocator="heads")
        return lambda file: void(arrays.compress(plan, q, k, k, threads=1, profile=profile.load(file)))
    return lambda file: void(load_picture(file))


def void(_: object) -> None: ...


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA, MOST_DATA))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    use = tried(kind, folder)
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            use(Path(line.strip()))
            said, reason = "ran", ""
        except KvedgeError as error:
            said, reason = "refused", one_line(error)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            said, reason = "raised", one_line(f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})")
        print(said, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, reason, flush=True)


if __name__ == "__main__":
    main()
