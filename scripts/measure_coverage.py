"""What the tests reach: lines and branches of native/src, by gcov, and of pykvedge, by coverage.py.

    python3 scripts/dev.py coverage [--below 80] [--json] [PYTEST'S ARGUMENTS]

Runs the native tests with a libkvedge that counts, then pytest with the same library, and every process that the tests
begin. What is killed, or ends without its handlers, is not counted. The first table has the folders, the second one the
files of which fewer than --below of 100 lines are reached. Tests that fail are named; the figures are printed all the
same. Some 30 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sanitize
from build_stock import find_build
from llama_source import ROOT, SourceError, ended, log
from native_build import build_native

WORK = ROOT / "build" / "coverage"
RULES = """[run]
branch = true
source_pkgs = pykvedge
    kvedge_lab
parallel = true
sigterm = true
patch = subprocess
data_file = {data}
"""


@dataclass
class Reached:
    """Lines and branches of a file or a folder: reached, and all."""

    name: str
    lines: int = 0
    all_lines: int = 0
    branches: int = 0
    all_branches: int = 0

    def add(self, other: Reached) -> None:
        self.lines, self.all_lines = self.lines + other.lines, self.all_lines + other.all_lines
        self.branches, self.all_branches = self.branches + other.branches, self.all_branches + other.all_branches

    @property
    def line_share(self) -> float:
        return 100 * self.lines / self.all_lines if self.all_lines else 100.0

    def as_json(self) -> dict[str, Any]:
        branches = 100 * self.branches / self.all_branches if self.all_branches else None
        return {"name": self.name, "lines": self.all_lines, "lines_reached": round(self.line_share, 1),
                "branches": self.all_branches, "branches_reached": branches and round(branches, 1)}  # fmt: skip


def run(command: list[str], **variables: str) -> bool:
    """Runs a command whose output is for people. Tells whether it ended well."""
    done = subprocess.run(command, stdout=sys.stderr, env={**os.environ, **variables}, cwd=ROOT, check=False)
    return done.returncode == 0


def build() -> Path:
    """Builds the native tests and a library that count; returns their folder. Raises SourceError."""
    kvedge = find_build()
    options = {"KVEDGE_COVERAGE": "ON", "KVEDGE_LLAMA_DIR": (kvedge / "llama.cpp").as_posix(),
               "KVEDGE_LLAMA_LIBS": (kvedge / "bin").as_posix()}  # fmt: skip
    programs = build_native("coverage", ["kvedge-tests", "kvedge"], **options)
    for counts in programs.parent.rglob("*.gcda"):  # of an earlier run
        counts.unlink()
    return programs


def library_folder(programs: Path) -> Path:
    """Makes a folder of kvedge's libraries with the one that counts among them."""
    folder = WORK / "lib"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(find_build() / "bin", folder, symlinks=True, ignore=shutil.ignore_patterns("libkvedge*"))
    found = list(programs.rglob("libkvedge.so*"))
    if not found:
        raise SourceError(f"{programs} holds no libkvedge; coverage is counted on Linux")
    for path in found:
        shutil.copy2(path, folder / path.name, follow_symlinks=False)
    return folder


def native_tests(programs: Path) -> list[str]:
    """Runs them. Returns those that failed."""
    with tempfile.TemporaryDirectory(prefix="kvedge-coverage-") as folder:
        return [Path(one[0]).name for one in sanitize.commands(programs, False, Path(folder)) if not run(one)]


def python_tests(programs: Path, args: list[str]) -> bool:
    """Runs pytest, counting in both languages. Tells whether all tests passed."""
    rules = WORK / "coverage.ini"
    rules.write_text(RULES.format(data=WORK / "data"), encoding="utf-8")
    for old in WORK.glob("data*"):
        old.unlink()
    coverage = [sys.executable, "-m", "coverage"]
    folder = str(library_folder(programs))
    passed = run([*coverage, "run", f"--rcfile={rules}", "-m", "pytest", *args], KVEDGE_LIB_DIR=folder)
    run([*coverage, "combine", "-q", f"--rcfile={rules}"])
    if not run([*coverage, "json", "-q", f"--rcfile={rules}", "-o", str(WORK / "python.json")]):
        raise SourceError("coverage.py found nothing to count")
    return passed


def of_python() -> list[Reached]:
    found = json.loads((WORK / "python.json").read_text(encoding="utf-8"))["files"]
    out = []
    for name, of in found.items():
        n = of["summary"]
        out.append(Reached(name, n["covered_lines"], n["num_statements"], n["covered_branches"], n["num_branches"]))
    return out


def of_native(programs: Path) -> list[Reached]:
    made = WORK / "native.json"
    done = run([
        sys.executable, "-m", "gcovr", "--root", str(ROOT), "--filter", f"{ROOT}/native/src/", "--json-summary",
        str(made), "--exclude-throw-branches", "--exclude-unreachable-branches", "--merge-mode-functions=separate",
        "--gcov-ignore-parse-errors=all", "-j", str(os.cpu_count() or 1), str(programs.parent),
    ])  # fmt: skip
    if not done:
        raise SourceError("gcovr cannot read the counts")
    keys = ("line_covered", "line_total", "branch_covered", "branch_total")
    found = json.loads(made.read_text(encoding="utf-8"))["files"]
    return [Reached(of["filename"], *(of[key] for key in keys)) for of in found]


def folders(files: Iterable[Reached]) -> list[Reached]:
    """Adds files up by their folders, down to the third, and to all of a language's."""
    out: dict[str, Reached] = {}
    for one in files:
        parts = Path(one.name).parts[:-1]
        for name in {parts[: 2 if parts[0] == "native" else 1], parts[:3]}:
            out.setdefault("/".join(name), Reached("/".join(name))).add(one)
    return [out[name] for name in sorted(out)]


def table(title: str, rows: list[Reached]) -> str:
    lines = [f"{title:44} {'lines':>7} {'reached':>8} {'branches':>9} {'reached':>8}"]
    for row in rows:
        of = row.as_json()
        share = "-" if of["branches_reached"] is None else f"{of['branches_reached']:.1f} %"
        lines.append(f"{row.name:44} {row.all_lines:7} {row.line_share:6.1f} % {row.all_branches:9} {share:>8}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--below", type=float, default=80, help="of 100 lines (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one object in place of tables")
    args, rest = parser.parse_known_args()
    WORK.mkdir(parents=True, exist_ok=True)
    programs = build()
    failed = native_tests(programs)
    if not python_tests(programs, rest):
        failed.append("pytest")
    files = [*of_native(programs), *of_python()]
    low = sorted((one for one in files if one.line_share < args.below), key=lambda one: one.line_share)
    if args.json:
        out = {"folders": folders(files), "below": low}
        print(json.dumps({name: [one.as_json() for one in rows] for name, rows in out.items()}))
    else:
        print(table("folder", folders(files)))
        print()
        print(table(f"below {args.below:g} % of lines", low))
    for name in failed:
        log(f"error: {name} failed; the figures are those of what ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(ended(main))
