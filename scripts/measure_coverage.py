"""Measures what the tests reach: lines and branches of native/src, by gcov, and of pykvedge, by coverage.py.

    python3 scripts/dev.py coverage [PYTEST'S ARGUMENTS]

Runs the native tests with an instrumented libkvedge, then pytest with the same library; child processes count too. A
killed process is not counted, nor a process that skips its exit handlers. Prints the tables of coverage.py and gcovr: a
line for each file, the least covered first. Failed tests are named; the tables are printed anyway. 30 minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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


def run(command: list[str], **variables: str) -> bool:
    """Runs a command. Returns whether its exit code is 0."""
    return subprocess.run(command, env={**os.environ, **variables}, cwd=ROOT, check=False).returncode == 0


def build() -> Path:
    """Builds instrumented native tests and an instrumented libkvedge. Returns their folder. Raises SourceError."""
    kvedge = find_build()
    options = {"KVEDGE_COVERAGE": "ON", "KVEDGE_LLAMA_DIR": (kvedge / "llama.cpp").as_posix(),
               "KVEDGE_LLAMA_LIBS": (kvedge / "bin").as_posix()}  # fmt: skip
    programs = build_native("coverage", ["kvedge-tests", "kvedge"], **options)
    for counts in programs.parent.rglob("*.gcda"):  # counts of an earlier run
        counts.unlink()
    return programs


def library_folder(programs: Path) -> Path:
    """Makes a folder of kvedge's libraries with the instrumented libkvedge. Returns the folder."""
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
    """Runs the native tests. Returns the names of the failed tests."""
    with tempfile.TemporaryDirectory(prefix="kvedge-coverage-") as folder:
        listed = sanitize.commands(programs, ["kvedge-tests"], Path(folder))
        return [Path(command[0]).name for command in listed if not run(command)]


def python_tests(programs: Path, args: list[str]) -> bool:
    """Runs pytest, counts in both languages, and prints the table of Python. Returns whether all tests passed."""
    rules = WORK / "coverage.ini"
    rules.write_text(RULES.format(data=WORK / "data"), encoding="utf-8")
    for old in WORK.glob("data*"):
        old.unlink()
    coverage = [sys.executable, "-m", "coverage"]
    folder = str(library_folder(programs))
    passed = run([*coverage, "run", f"--rcfile={rules}", "-m", "pytest", *args], KVEDGE_LIB_DIR=folder)
    run([*coverage, "combine", "-q", f"--rcfile={rules}"])
    if not run([*coverage, "report", f"--rcfile={rules}", "--sort=cover"]):
        raise SourceError("coverage.py found nothing to count")
    return passed


def show_native(programs: Path) -> None:
    """Prints the table of gcov, a line for each file."""
    counted = ["--exclude-throw-branches", "--exclude-unreachable-branches", "--merge-mode-functions=separate"]
    if not run([
        sys.executable, "-m", "gcovr", "--root", str(ROOT), "--filter", f"{ROOT}/native/src/", *counted,
        "--gcov-ignore-parse-errors=all", "-j", str(os.cpu_count() or 1), "--sort", "uncovered-percent",
        "--txt", "/dev/stdout", str(programs.parent),
    ]):  # fmt: skip
        raise SourceError("gcovr cannot read the counts")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help="arguments of pytest")
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    programs = build()
    failed = native_tests(programs)
    if not python_tests(programs, args.pytest):
        failed.append("pytest")
    show_native(programs)
    for name in failed:
        log(f"error: {name} failed; the figures are those of what ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(ended(main))
