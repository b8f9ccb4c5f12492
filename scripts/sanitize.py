"""The native tests under the address, undefined-behaviour and thread sanitizers.

    python3 scripts/dev.py sanitize [address,undefined] [thread] [glue]

Each sanitizer is a build of its own of native/ (build/native/SANITIZER). kvedge-glue-tests drives the public C
interface through llama.cpp, with tiny models and several threads; `glue` runs nothing but that. The address sanitizer
watches what our code does with memory, whoever allocated it: llama.cpp is the one of kvedge's own build. The thread
sanitizer has to see every synchronisation: it compiles libllama and ggml, some three minutes on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from build_stock import find_build
from llama_source import ROOT, SourceError, ended, log
from native_build import FEWER, build_native

SANITIZERS = ("address,undefined", "thread")  # the first two get on with each other in one build
MODELS = ("llama", "gemma3")  # all layers kvedge's; windowed layers with llama.cpp


def build(sanitizer: str, targets: list[str]) -> Path:
    """Builds the programs with a sanitizer, and returns their folder. Raises SourceError when the build fails."""
    kvedge = find_build()
    options = {"KVEDGE_SANITIZE": sanitizer, "KVEDGE_LLAMA_DIR": (kvedge / "llama.cpp").as_posix()}
    if sanitizer != "thread":
        options["KVEDGE_LLAMA_LIBS"] = (kvedge / "bin").as_posix()
    return build_native(sanitizer.replace(",", "-"), targets, **options)


def commands(programs: Path, only_glue: bool, folder: Path) -> Iterator[list[str]]:
    """Lists what is run: the tests, and the glue's with its models in a folder."""
    if not only_glue:
        tests = sorted(p for p in programs.glob("test_*") if p.is_file() and p.suffix in ("", ".exe"))
        if not tests:
            raise SourceError(f"{programs} holds no tests")
        yield from ([str(test)] for test in tests)
    script = ROOT / "scripts" / "make_tiny_models.py"
    made = [sys.executable, str(script), str(folder), *(word for kind in MODELS for word in ("--kind", kind))]
    subprocess.run(made, stdout=sys.stderr, check=True)
    models = [str(folder / kind / "model.gguf") for kind in MODELS]
    yield [str(programs / "kvedge-glue-tests"), str(folder), *models]


def run_tests(sanitizer: str, only_glue: bool) -> list[str]:
    """Builds and runs the tests; returns the names of those that failed. Raises SourceError when the build fails."""
    programs = build(sanitizer, ["kvedge-glue-tests"] if only_glue else ["kvedge-tests"])
    failed = []
    with tempfile.TemporaryDirectory(prefix="kvedge-sanitize-") as folder:
        for command in commands(programs, only_glue, Path(folder)):
            name = Path(command[0]).stem
            log(f"{sanitizer}: {name}")
            few = FEWER.get(name, []) if sanitizer == "thread" else []
            if subprocess.run([*command, *few], stdout=sys.stderr, check=False).returncode != 0:
                failed.append(f"{name} under the {sanitizer} sanitizer")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help=f"{' or '.join(SANITIZERS)} (default: both); glue: nothing but that"
    )
    args = parser.parse_args()
    for name in args.what:
        if name not in (*SANITIZERS, "glue"):
            parser.error(f"there is no {name}: {', '.join(SANITIZERS)} or glue")
    chosen = [name for name in args.what if name != "glue"] or SANITIZERS
    failed = [test for name in chosen for test in run_tests(name, "glue" in args.what)]
    for test in failed:
        log(f"error: {test} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(ended(main))
