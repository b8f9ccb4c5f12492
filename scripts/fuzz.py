"""Coverage-guided fuzzing: libFuzzer on native/fuzz, atheris on readers in Python. Exit code 1 after any finding.

    python3 scripts/dev.py fuzz [--seconds 60] [--target NAME] [--jobs 2] [--seed N] [--keep DIR] [--json]

Each target runs for the given seconds, `--jobs` targets at a time. It starts from the inputs in tests/fuzz and from
useful inputs of earlier runs in build/fuzz. With --seed, the number of inputs is limited to what a known machine tries
in that time; without earlier inputs, on Linux, the inputs are then the same each time. Prints one table: executions,
reached edges of the program, inputs that reach them, and findings. The inputs of findings are kept in DIR. Native
targets need clang with libFuzzer.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from build_stock import find_build
from llama_source import ROOT, SourceError, ended, log
from native_build import build_native

NATIVE = ("session", "plan", "arrays", "stages", "images")
PYTHON = ("gguf", "mmproj", "plan_json", "profile", "dataset", "note", "image", "wire", "tools",
          "model_file", "mmproj_file", "session_file")  # fmt: skip
FIRST = {"model_file": "gguf", "mmproj_file": "mmproj"}  # targets that use the first inputs of another target
SEEDS, WORK = ROOT / "tests" / "fuzz", ROOT / "build" / "fuzz"
VERSIONS = ("", *(f"-{n}" for n in range(22, 13, -1)))
LONGEST, MAX_MIB, LARGEST = 10, 1024, 16384  # limits of an input: seconds, MiB of memory, bytes
ENOUGH = 5  # number of findings after which a target is not started again
# Inputs per second of each target on one of two busy processors. With --seed, a target tries at most this number times
# its seconds: a faster machine finds no more, a slower machine tries only the first inputs.
PACE = {
    "session": 7000, "plan": 13000, "arrays": 700, "stages": 600, "images": 6000,
    "gguf": 5000, "mmproj": 6000, "plan_json": 36000, "profile": 49000, "dataset": 9500, "note": 50000,
    "image": 2800, "wire": 23000, "tools": 6000, "model_file": 40, "mmproj_file": 40, "session_file": 100,
}  # fmt: skip


@dataclass
class Outcome:
    """The result of one target."""

    target: str
    seconds: float = 0.0
    executions: int = 0
    edges: int = 0  # reached edges of the program, and reached features
    features: int = 0
    inputs: int = 0  # inputs that reach the edges
    most_mib: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Reads the counts from the output of libFuzzer."""
        steps = re.findall(r"^#(\d+)\t.*cov: (\d+) ft: (\d+) corp: (\d+)/", text, re.MULTILINE)
        total = re.search(r"stat::number_of_executed_units: *(\d+)", text)
        peak = re.search(r"stat::peak_rss_mb: *(\d+)", text)
        if steps:
            self.edges, self.features, self.inputs = (int(n) for n in steps[-1][1:])
        self.executions += int(total[1]) if total else int(steps[-1][0]) if steps else 0
        self.most_mib = max(self.most_mib, int(peak[1]) if peak else 0)


def llvm(name: str) -> str:
    """Returns the path of an LLVM program, with or without a version in its name; "" if it is missing."""
    return next((path for end in VERSIONS if (path := shutil.which(f"{name}{end}"))), "")


def clang() -> str:
    """Returns the path of clang++. Raises SourceError."""
    if found := llvm("clang++"):
        return found
    raise SourceError("no clang++ is here; on Debian or Ubuntu: apt-get install clang-19 libclang-rt-19-dev llvm-19")


def build() -> Path:
    """Builds the native targets and returns their folder. Raises SourceError."""
    options = {"CMAKE_CXX_COMPILER": clang(), "KVEDGE_SANITIZE": "address,undefined", "KVEDGE_FUZZ": "ON"}
    return build_native("fuzz", ["kvedge-fuzzers"], **options)


def environment(scratch: str) -> dict[str, str]:
    """Returns the environment of targets. scratch: a folder for files, in memory if possible: a disk is slower."""
    asan = "detect_leaks=1:allocator_may_return_null=1"
    if symbolizer := llvm("llvm-symbolizer"):  # names functions in reports
        asan += f":external_symbolizer_path={symbolizer}"
    native = {"ASAN_OPTIONS": asan, "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONHASHSEED": "0"}
    libraries = {"KVEDGE_LIB_DIR": os.environ.get("KVEDGE_LIB_DIR") or str(find_build() / "bin")}
    return {**os.environ, **native, **libraries, "TMPDIR": scratch}


def _same_addresses() -> list[str]:
    """Returns the words before a command that give it the same addresses each time, where the system can do that."""
    words = ["setarch", "-R"]
    can = shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    return words if can else []


def reason(text: str) -> str:
    """Returns the most useful line of a report."""
    if python := re.search(r"Uncaught Python exception: ===\s*\n(.*)", text):
        return python[1].strip()
    lines = (r"error: .*", r"SUMMARY: (?!libFuzzer).*", r".*: runtime error: .*", r"==\d+== ERROR: .*", r"\S+:\d+: .*")
    for line in lines:
        if found := re.search(f"^{line}", text, re.MULTILINE):
            return found[0].strip()
    return "ended without a word"


@dataclass
class Run:
    """The settings of a run, the same for all targets."""

    seconds: float
    programs: Path | None  # folder of the native targets
    keep: Path
    env: dict[str, str]
    seed: int = 0  # 0: a new random seed

    def program(self, target: str) -> list[str]:
        """Returns the command of a target with its limits, without inputs."""
        script = str(ROOT / "scripts" / "fuzz_python.py")
        native = self.programs is not None and target in NATIVE
        program = [str(self.programs / f"fuzz_{target}")] if native else [sys.executable, script, target]
        return [*program, f"-timeout={LONGEST}", f"-rss_limit_mb={MAX_MIB}", f"-max_len={LARGEST}"]

    def command(self, target: str, seconds: float, seed: int, runs: int) -> list[str]:
        """Returns the command of one run. runs: the largest number of inputs; -1: no limit."""
        program = self.program(target)
        ends = [f"-seed={seed}", f"-runs={runs}", f"-max_total_time={int(seconds)}"]
        if seed:  # reloading inputs depends on the clock; addresses are part of some inputs
            program, ends = [*_same_addresses(), *program], [*ends, "-reload=0"]
        told = ["-print_final_stats=1", f"-artifact_prefix={self.keep / target}-"]
        return [*program, *ends, *told, str(WORK / "corpus" / target), str(SEEDS / FIRST.get(target, target))]

    def kept(self, target: str) -> set[str]:
        """Returns the names of the kept inputs. A slow input that is faster than LONGEST is no finding."""
        names = {path.name for path in self.keep.glob(f"{target}-*")}
        return {name for name in names if not name.startswith(f"{target}-slow-unit-")}

    def by_chance(self, target: str, name: str) -> bool:
        """Repeats an input that timed out. Forgets the input if it is fast now: then the machine was busy."""
        if not name.startswith(f"{target}-timeout-"):
            return False
        command = [*self.program(target), str(self.keep / name)]
        if subprocess.run(command, capture_output=True, env=self.env, check=False).returncode != 0:
            return False
        log(f"{target}: {name} took long once, and not again")
        (self.keep / name).unlink()
        return True

    def fuzz(self, target: str) -> Outcome:
        """Runs one target, and starts it again after each finding."""
        out, start = Outcome(target), time.monotonic()
        (WORK / "corpus" / target).mkdir(parents=True, exist_ok=True)
        most = round(self.seconds * PACE[target]) if self.seed else 0
        while (left := self.seconds - (time.monotonic() - start)) >= 1 and len(out.findings) < ENOUGH:
            runs = most - out.executions if most else -1
            if most and runs <= 0:
                break
            before = self.kept(target)
            seed = self.seed and self.seed + len(out.findings)  # another seed does not find the same input first
            with (WORK / f"{target}.log").open("wb") as written:
                done = subprocess.run(
                    self.command(target, left, seed, runs), stdout=written, stderr=written, env=self.env, check=False
                )
            text = (WORK / f"{target}.log").read_text(encoding="utf-8", errors="replace")
            out.add(text)
            named = self.kept(target) - before
            kept = sorted(name for name in named if not self.by_chance(target, name))
            if named and not kept and not self.seed:  # with a seed, a new start would try other inputs
                continue
            if not kept and (named or done.returncode == 0):
                break
            out.findings.append(f"{reason(text)} ({', '.join(kept) or f'exit code {done.returncode}'})")
            if not kept:  # the target cannot start
                break
        out.seconds = round(time.monotonic() - start, 1)
        return out


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["target       seconds  executions   edges  features  inputs     MiB  findings"]
    for o in outcomes:
        lines.append(
            f"{o.target:<11}{o.seconds:>9.0f}{o.executions:>12}{o.edges:>8}{o.features:>10}{o.inputs:>8}"
            f"{o.most_mib:>8}{len(o.findings):>10}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target (default: 60)")
    parser.add_argument("--target", action="append", choices=(*NATIVE, *PYTHON), metavar="NAME",
                        help=f"only this one, repeatable: {', '.join((*NATIVE, *PYTHON))}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of what is tried (default: another one each time)")
    parser.add_argument("--keep", type=Path, default=WORK / "found", metavar="DIR", help="default: build/fuzz/found")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    targets = args.target or (*NATIVE, *PYTHON)
    programs = build() if set(targets) & set(NATIVE) else None
    keep: Path = args.keep.resolve()
    keep.mkdir(parents=True, exist_ok=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    log(f"fuzzing {len(targets)} targets, {args.seconds:g} seconds each, {args.jobs} at a time")
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="kvedge-fuzz-", dir=memory) as scratch,
        ThreadPoolExecutor(max(1, args.jobs)) as pool,
    ):
        for outcome in pool.map(Run(args.seconds, programs, keep, environment(scratch), args.seed).fuzz, targets):
            outcomes.append(outcome)
            n, found = outcome.executions, len(outcome.findings)
            log(f"{outcome.target}: {n} executions in {outcome.seconds:.0f} s, {found} findings")
    print(json.dumps([asdict(outcome) for outcome in outcomes]) if args.json else table(outcomes), flush=True)
    for outcome in outcomes:
        for finding in outcome.findings:
            log(f"error: {outcome.target}: {finding}; inputs are in {args.keep}")
    return 1 if any(outcome.findings for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(ended(main))
