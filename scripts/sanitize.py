"""The native tests under the address, undefined-behaviour and thread sanitizers.

    python3 scripts/dev.py sanitize [address,undefined] [thread] [glue] [--fewer]

Each sanitizer is a build of its own of native/ (build/native/SANITIZER). kvedge-glue-tests drives the public C
interface through llama.cpp, with tiny models and several threads; `glue` runs nothing but that. The address sanitizer
watches what our code does with memory, whoever allocated it: llama.cpp is the one of kvedge's own build. The thread
sanitizer has to see every synchronisation: it compiles libllama and ggml, some three minutes on two cores, and runs
some of the cases of tests with many. With --fewer, as in CI, the address sanitizer does so where they take minutes, and
the thread sanitizer runs the tests with several threads only.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from build_stock import find_build
from llama_source import SourceError, ended, log
from modelgen.tiny import default_spec, write_tiny
from native_build import FEWER, GLUE_SHAPE, THREADED, build_native

SANITIZERS = ("address,undefined", "thread")  # the first two get on with each other in one build
SLOW = ("test_attention",)  # three minutes under the address sanitizer, the others of FEWER one together
AT_ONCE = 2
GLUE = "kvedge-glue-tests"
MODELS = ("llama", "gemma3")  # all layers kvedge's; windowed layers with llama.cpp


def build(sanitizer: str, targets: list[str]) -> Path:
    """Builds the programs with a sanitizer, and returns their folder. Raises SourceError when the build fails."""
    kvedge = find_build()
    options = {"KVEDGE_SANITIZE": sanitizer, "KVEDGE_LLAMA_DIR": (kvedge / "llama.cpp").as_posix()}
    if sanitizer != "thread":
        options["KVEDGE_LLAMA_LIBS"] = (kvedge / "bin").as_posix()
    return build_native(sanitizer.replace(",", "-"), targets, **options)


def few(sanitizer: str, name: str, fewer: bool) -> list[str]:
    """Arguments with which a test runs some of its cases; none: all of them."""
    return FEWER.get(name, []) if sanitizer == "thread" or (fewer and name in SLOW) else []


def passes(sanitizer: str, command: list[str]) -> bool:
    """Runs a program, with its name and what it says on stderr once it has ended."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    text = done.stdout.decode(errors="replace")
    print(f"{sanitizer}: {Path(command[0]).stem}\n{text}", end="", file=sys.stderr, flush=True)
    return done.returncode == 0


def commands(programs: Path, names: list[str], folder: Path) -> list[list[str]]:
    """Lists what is run: the tests of these names, or "kvedge-tests" for all, and last the glue's, with models that
    are made for them in a folder.
    """
    tests = sorted(p for p in programs.glob("test_*") if p.is_file() and p.suffix in ("", ".exe"))
    if not tests and names != [GLUE]:
        raise SourceError(f"{programs} holds no tests")
    if "kvedge-tests" not in names:
        tests = [p for p in tests if p.stem in names]
    specs = {kind: replace(default_spec(kind), **GLUE_SHAPE) for kind in MODELS}
    models = [str(write_tiny(kind, folder / kind, spec=spec)[0]) for kind, spec in specs.items()]
    return [*([str(test)] for test in tests), [str(programs / GLUE), str(folder), *models]]


def run_tests(sanitizer: str, only_glue: bool, fewer: bool) -> list[str]:
    """Builds and runs the tests; returns the names of those that failed. Raises SourceError when the build fails."""
    some = [*THREADED, GLUE] if sanitizer == "thread" and fewer else ["kvedge-tests"]
    names = [GLUE] if only_glue else some
    programs = build(sanitizer, names)
    with tempfile.TemporaryDirectory(prefix="kvedge-sanitize-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        listed = commands(programs, names, Path(folder))
        *tests, glue = [[*command, *few(sanitizer, Path(command[0]).stem, fewer)] for command in listed]
        failed = [c for c, good in zip(tests, pool.map(lambda c: passes(sanitizer, c), tests), strict=True) if not good]
        if not passes(sanitizer, glue):  # by itself: threads of llama.cpp spin, and others would have to wait
            failed.append(glue)
    return [f"{Path(command[0]).stem} under the {sanitizer} sanitizer" for command in failed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help=f"{' or '.join(SANITIZERS)} (default: both); glue: nothing but that"
    )
    parser.add_argument("--fewer", action="store_true", help="some of the tests, and of their cases")
    args = parser.parse_args()
    for name in args.what:
        if name not in (*SANITIZERS, "glue"):
            parser.error(f"there is no {name}: {', '.join(SANITIZERS)} or glue")
    chosen = [name for name in args.what if name != "glue"] or SANITIZERS
    failed = [test for name in chosen for test in run_tests(name, "glue" in args.what, args.fewer)]
    for test in failed:
        log(f"error: {test} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(ended(main))
