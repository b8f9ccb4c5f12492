"""Tries a wheel for another system with the emulator that cross.py names. No Python of that system runs.

    python3 scripts/check_cross_wheel.py dist/kvedge-*_aarch64.whl
    python3 scripts/check_cross_wheel.py dist/kvedge-*-win_amd64.whl

The cross compiler builds examples/c/ask.c with only the unpacked wheel, and the program is asked about an image on each
processor of the emulator. Prints one line for each processor; exit code 1 if an answer is wrong.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

from check_wheel import ANSWER, QUESTION, SCENE
from cross import TARGETS, Target
from cross_whole import THREADS, ask
from llama_source import ROOT, SourceError, ended
from wine import windows

MACHINES = {"aarch64": "aarch64", "win_amd64": "mingw"}  # end of a wheel's name: target of cross.py


def target_of(wheel: Path) -> Target:
    """Returns the system that a wheel is for. Raises SourceError if cross.py does not have it."""
    for end, name in MACHINES.items():
        if wheel.suffix == ".whl" and wheel.stem.endswith(end):
            return TARGETS[name]
    raise SourceError(f"{wheel.name} is no wheel for one of {', '.join(MACHINES)}")


def compiled(package: Path, target: Target) -> Path:
    """Builds the program with an unpacked package, into the package's lib folder. Raises SourceError."""
    # -S: without it, Python would import an editable kvedge of this environment
    paths = [str(package.parent), sysconfig.get_path("purelib")]
    said = subprocess.run(
        [sys.executable, "-S", "-m", "pykvedge", "--cflags", "--libs"], cwd=package.parent, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    program = package / "lib" / "ask.exe"  # Windows searches libraries in the program's folder
    compiler = str(target.compiler.path).replace("g++", "gcc")
    command = [compiler, "-std=c11", "-O1", str(ROOT / "examples" / "c" / "ask.c"), "-o", str(program)]
    done = subprocess.run([*command, *shlex.split(said)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SourceError(f"the program in C is not built: {(done.stderr.splitlines() or ['no word'])[0]}")
    return program


def answers(package: Path, target: Target) -> None:
    """Asks on each processor. Raises SourceError at the first wrong answer."""
    program, data = compiled(package, target), package / "data"
    picture = ["--mmproj", str(data / "demo-mmproj.gguf"), "--image", str(SCENE)]
    for processor in target.processors:
        start = time.monotonic()
        question = [*picture, "--threads", THREADS, str(data / "demo-model.gguf"), QUESTION]
        said = ask(target.command(processor, program, *question))
        kernels = said.figures["kernels"]
        if said.answer != ANSWER or kernels != (processor.kernels or kernels):
            raise SourceError(f"{processor.name}: it says '{said.answer}' with {kernels}, not '{ANSWER}'")
        print(f"{processor.name} ({kernels}): {said.answer}, {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("error: give one wheel that exists", file=sys.stderr)
        return 2
    wheel = Path(sys.argv[1]).resolve()
    target = target_of(wheel)
    target.require_tools()
    with tempfile.TemporaryDirectory(prefix="kvedge-wheel-") as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wine = windows(str(target.emulator.path)) if "wine" in target.emulator.package else contextlib.nullcontext()
        with wine:
            answers(Path(folder) / "pykvedge", target)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
