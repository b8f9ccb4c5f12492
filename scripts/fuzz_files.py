"""Mutants of the files that kvedge reads: each is answered with or refused, without a crash, a hang or much memory.

    .venv/bin/python scripts/fuzz_files.py [--cases 5000] [--kind model] [--seed 1] [--keep FOLDER]

Kinds: model, mmproj, session, plan, profile, image. A worker process tries many and is begun anew where it ends.
What fails is kept in FOLDER, and named by its seed and number, which make it again.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from fuzz_mutants import MAKERS, mutant
from llama_source import SourceError, ended, log

WORKER = Path(__file__).with_name("fuzz_worker.py")
LONGEST, START = 10.0, 120.0  # seconds for a file, and until a worker is ready
MOST_KIB = 1 << 20  # memory that a worker may hold at most


class WorkerError(Exception):
    """The worker did not answer; says how it ended."""


class Worker:
    def __init__(self, kind: str, folder: Path, env: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, WORKER, kind, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env=env, text=True, errors="replace",
        )  # fmt: skip
        self._answer(START)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def ask(self, file: Path) -> list[str]:
        """What was said, the KiB held, and a reason. Raises WorkerError."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{file}\n")
        self.process.stdin.flush()
        line = self._answer(LONGEST)
        if line.partition(" ")[0] not in ("ran", "refused", "raised"):
            raise WorkerError(f"wrote to stdout: {line}")
        return [*line.split(" ", 2), ""][:3]

    def _answer(self, seconds: float) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise WorkerError(f"no answer in {seconds:.0f} seconds")
        line = self.process.stdout.readline().strip()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            raise WorkerError(f"ended with code {code}: {self.errors.read()[-1000:].decode(errors='replace')}")
        return line


@dataclass
class Found:
    """What became of the mutants of a kind."""

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    most_kib: int = 0


def originals(folder: Path) -> None:
    """One file of each kind that is right, by its name."""
    import numpy as np
    from make_tiny_models import default_spec, write_tiny
    from PIL import Image

    import pykvedge
    from pykvedge.plans import profile

    model, mmproj = write_tiny("llava", folder, spec=default_spec("llava"))
    shutil.move(model, folder / "model")
    shutil.move(str(mmproj), folder / "mmproj")
    Image.linear_gradient("L").resize((48, 40)).convert("RGB").save(folder / "image", format="PNG")
    with pykvedge.Session(folder / "model", None, pykvedge.plan("lookm", 0.5), threads=1) as session:
        session.ask("What is this?", [], pykvedge.runtime.sampling.Sampling(max_tokens=4)).read()
        session.save(folder / "session")
    plan = pykvedge.plan("snapkv", 0.5, allocator="ada", reducer="weighted")
    (folder / "plan").write_text(plan.to_json())
    values = np.random.default_rng(1).gamma(0.3, 1.0, (2, 4))
    profile.save(profile.Profile("visual-heads", values, (), "0" * 64, 1, {}), folder / "profile")


def fuzz(kind: str, cases: int, seed: int, folder: Path, env: dict[str, str], keep: Path | None = None) -> Found:
    """Tries the mutants of one kind; folder: that of originals()."""
    found, number = Found(kind), 0
    data, file = (folder / kind).read_bytes(), folder / f"{kind}-mutant"
    while number < cases:
        with Worker(kind, folder, env) as worker:
            said, _, reason = worker.ask(folder / kind)
            if said != "ran":
                raise SourceError(f"{kind}: the file that nothing was changed in is {said}: {reason}")
            while number < cases:
                file.write_bytes(mutant(kind, data, seed, number))
                number += 1
                try:
                    said, kib, reason = worker.ask(file)
                except (WorkerError, BrokenPipeError) as error:
                    said, kib, reason = "ended", "0", str(error)
                found.counts[said] += 1
                found.most_kib = max(found.most_kib, int(kib))
                if said in ("raised", "ended") or int(kib) > MOST_KIB:
                    found.failures.append(f"{kind}, seed {seed}, number {number - 1}: {said}, {kib} KiB, {reason}")
                    if keep:
                        keep.mkdir(parents=True, exist_ok=True)
                        shutil.copy(file, keep / f"{kind}-{seed}-{number - 1}")
                    break  # a new worker
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--kind", action="append", choices=tuple(MAKERS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kvedge-fuzz-") as folder:
        originals(Path(folder))
        for kind in args.kind or MAKERS:
            start = time.monotonic()
            found = fuzz(kind, args.cases, args.seed, Path(folder), dict(os.environ), args.keep)
            counts = ", ".join(f"{n} {said}" for said, n in sorted(found.counts.items()))
            log(f"{kind}: {counts}; at most {found.most_kib >> 10} MiB, {time.monotonic() - start:.0f} s")
            for failure in found.failures:
                log(f"  {failure}")
            failed += len(found.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(ended(main))
