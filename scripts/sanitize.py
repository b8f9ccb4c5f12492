"""The native tests under the address, undefined-behaviour and thread sanitizers.

    python3 scripts/dev.py sanitize [address,undefined] [thread] [glue] [--fewer]

Each sanitizer has its own build of native/ (build/native/SANITIZER). kvedge-glue-tests drives the public C interface
through llama.cpp, with tiny models and several threads; `glue` runs only this program. The address sanitizer checks
kvedge's memory accesses, so it uses the llama.cpp of kvedge's build. The thread sanitizer must see every
synchronisation: it compiles libllama and ggml, some three minutes on two cores, and runs only some cases of long tests.
With --fewer, as in CI, the address sanitizer also runs only some cases of the slowest tests, and the thread sanitizer
runs only the tests with several threads.
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
from native_build import FEWER_CASES, GLUE_SHAPE, THREADED, build_native

SANITIZERS = ("address,undefined", "thread")  # the first two sanitizers can share a build
SLOW = ("test_attention",)  # three minutes under the address sanitizer; other tests of FEWER_CASES: one minute
AT_ONCE = 2
GLUE = "kvedge-glue-tests"
MODELS = ("llama", "gemma3")  # all layers in kvedge; windowed layers in llama.cpp


def build(sanitizer: str, targets: list[str]) -> Path:
    """Builds the programs with a sanitizer. Returns their folder. Raises SourceError when the build fails."""
    kvedge = find_build()
    options = {"KVEDGE_SANITIZE": sanitizer, "KVEDGE_LLAMA_DIR": (kvedge / "llama.cpp").as_posix()}
    if sanitizer != "thread":
        options["KVEDGE_LLAMA_LIBS"] = (kvedge / "bin").as_posix()
    return build_native(sanitizer.replace(",", "-"), targets, **options)


def few(sanitizer: str, name: str, fewer: bool) -> list[str]:
    """Returns the arguments for fewer cases of a test; empty: all cases."""
    return FEWER_CASES.get(name, []) if sanitizer == "thread" or (fewer and name in SLOW) else []


def passes(sanitizer: str, command: list[str]) -> bool:
    """Runs a program, then prints its name and output on stderr. Returns whether it passed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    text = done.stdout.decode(errors="replace")
    print(f"{sanitizer}: {Path(command[0]).stem}\n{text}", end="", file=sys.stderr, flush=True)
    return done.returncode == 0


def commands(programs: Path, names: list[str], folder: Path) -> list[list[str]]:
    """Returns the commands: the tests of these names ("kvedge-tests": all tests), and last the glue tests, with models
    written into `folder`.
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
    """Builds and runs the tests. Returns the names of the failed tests. Raises SourceError when the build fails."""
    some = [*THREADED, GLUE] if sanitizer == "thread" and fewer else ["kvedge-tests"]
    names = [GLUE] if only_glue else some
    programs = build(sanitizer, names)
    with tempfile.TemporaryDirectory(prefix="kvedge-sanitize-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        listed = commands(programs, names, Path(folder))
        *tests, glue = [[*command, *few(sanitizer, Path(command[0]).stem, fewer)] for command in listed]
        failed = [c for c, good in zip(tests, pool.map(lambda c: passes(sanitizer, c), tests), strict=True) if not good]
        if not passes(sanitizer, glue):  # runs alone: threads of llama.cpp spin, and other tests would wait
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
