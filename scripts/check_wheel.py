"""Tries a wheel as a user without a compiler would: a fresh environment, an empty PATH, an empty folder and home.

    python3 scripts/check_wheel.py dist/kvedge-*.whl
    python3 scripts/check_wheel.py dist/kvedge-*.whl --cpu Nehalem --cpu Haswell

pip may fetch the dependencies, as wheels only. Then the packaged model is asked about an image by `kvedge chat`, and by
a program in C, built by the system's compiler with the flags of `python -m pykvedge --cflags --libs`. It also completes
a text through llama_cpp with pykvedge.attach, imported in both orders. --cpu repeats all of it on an older processor,
under qemu-x86_64 (Debian: qemu-user). Prints one line for each step, with ggml's CPU variant if one was loaded; exit
code 1 if a step fails.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llama_source import ROOT, SourceError, ended

SCENE = ROOT / "examples" / "scene-1.png"
QUESTION, ANSWER = "What is the code?", "64UM3"  # examples/scenes.md
LIMIT = 900  # seconds for a step; qemu is slow

ATTACHED = """
import {imports}
from pathlib import Path
from llama_cpp import Llama
llm = Llama(str(Path(pykvedge.__path__[0]) / "data" / "demo-model.gguf"), n_ctx=512, n_threads=2, verbose=False)
attached = pykvedge.attach(llm, "h2o", 0.5)
llm("A red circle at the top left, a blue square at the bottom right. " * 4, max_tokens=4, temperature=0)
print("compressed" if attached.stats().n_compressions == 1 else "not compressed", attached.kept()[0][0])
llm.close()
"""
VARIANT = """
import pykvedge
from pykvedge.native import libraries
libraries.llama()
maps = open("/proc/self/maps", encoding="utf-8").read().split()
print(*sorted({p.rpartition("/")[2] for p in maps if "ggml-cpu" in p}))
"""


class Place:
    """The fresh environment. Runs programs in it."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.work, self.home = folder / "venv", folder / "work", folder / "home"
        self.empty = folder / "bin"
        for made in (self.work, self.home, self.empty):
            made.mkdir(parents=True)
        self.emulator: list[str] = []

    def program(self, name: str) -> str:
        if os.name == "nt":
            return str(self.venv / "Scripts" / f"{name}.exe")
        return str(self.venv / "bin" / name)

    def run(self, what: str, command: Sequence[str | Path]) -> str:
        """Runs a command in the empty folder and returns its stdout. Raises SourceError."""
        keep = ("PIP_", "SSL_", "REQUESTS_", "HTTP", "http", "NO_PROXY", "no_proxy", "SYSTEMROOT", "LANG", "LC_")
        env = {k: v for k, v in os.environ.items() if k.startswith(keep)}
        env |= {"PATH": str(self.empty), "HOME": str(self.home), "TMPDIR": str(self.home), "PYTHONUTF8": "1"}
        full = [*self.emulator, *map(str, command)]
        try:
            done = subprocess.run(
                full, cwd=self.work, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            raise SourceError(f"{what}: not done after {LIMIT} s") from None
        if done.returncode != 0:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise SourceError(f"{what}: exit code {done.returncode}: {lines[-1] if lines else 'no output'}")
        return done.stdout

    def said(self, text: str, what: str, command: Sequence[str | Path]) -> None:
        """Runs a command and checks that its output begins with `text`. Raises SourceError."""
        said = " ".join(self.run(what, command).split())
        if not f"{said} ".startswith(text):
            raise SourceError(f"{what}: it says '{said}', not '{text.strip()}'")
        print(f"{what}: {said}", flush=True)


def install(place: Place, wheel: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(place.venv)], check=True)
    # "install" must not depend on package indexes in the user's pip settings
    pip = [place.program("python"), "-m", "pip", "--disable-pip-version-check", "install", "--only-binary", ":all:"]
    place.run("install", [*pip, str(wheel)])
    place.run("pip check", [place.program("python"), "-m", "pip", "--disable-pip-version-check", "check"])
    size = sum(p.stat().st_size for p in place.venv.glob("lib*/python*/site-packages/pykvedge/**/*") if p.is_file())
    print(f"installed: {wheel.stat().st_size / 1e6:.1f} MB, {size / 1e6:.1f} MB unpacked", flush=True)


def package(place: Place) -> Path:
    """Returns the folder of the installed package."""
    emulator, place.emulator = place.emulator, []
    where = place.run("package", [place.program("python"), "-c", "import pykvedge; print(pykvedge.__path__[0])"])
    place.emulator = emulator
    return Path(where.strip())


def compiled(place: Place) -> Path:
    """Builds the program in C with the installed libraries. Needs a C compiler, unlike the other steps."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SourceError("the program in C: no C compiler")
    out = place.home / "ask"
    flags = place.run("flags", [place.program("python"), "-m", "pykvedge", "--cflags", "--libs"])
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", str(ROOT / "examples" / "c" / "ask.c")]
    command += ["-o", str(out), *shlex.split(flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SourceError(f"the program in C is not built: {done.stderr.strip().splitlines()[0]}")
    return out


def refused(place: Place, program: Path) -> None:
    """Checks that the program in C fails with a message when the CPU variants are missing."""
    lib, away = package(place) / "lib", place.home / "variants"
    variants = [path for path in lib.iterdir() if "ggml-cpu-" in path.name]
    if not variants:
        return
    away.mkdir()
    for path in variants:
        path.rename(away / path.name)
    try:
        place.run("no variants", [program, "model", "question"])
    except SourceError as error:
        if "holds no CPU backend of ggml" not in str(error):
            raise
        print(f"refused as it should be: {error}", flush=True)
        return
    finally:
        for path in variants:
            (away / path.name).rename(path)
    raise SourceError("the program in C does not say that the CPU variants are missing")


def ask(place: Place, program: Path | None, label: str) -> None:
    python = place.program("python")
    if sys.platform.startswith("linux"):
        print(f"{label}loads {place.run('variant', [python, '-c', VARIANT]).strip()}", flush=True)
    chat = [python, "-m", "pykvedge", "chat", "--image", SCENE]
    place.said(ANSWER, f"{label}kvedge chat", [*chat, QUESTION])
    place.said(ANSWER, f"{label}kvedge chat --method lookm", [*chat, "--method", "lookm", "--budget", "0.7", QUESTION])
    for order in ("pykvedge, llama_cpp", "llama_cpp, pykvedge"):
        place.said("compressed ", f"{label}import {order}; attach", [python, "-c", ATTACHED.format(imports=order)])
    if program is not None:
        ask_in_c(place, program, label)


def ask_in_c(place: Place, program: Path, label: str) -> None:
    data = package(place) / "data"
    picture = ["--mmproj", data / "demo-mmproj.gguf", "--image", SCENE]
    place.said(ANSWER, f"{label}a program in C", [program, *picture, data / "demo-model.gguf", QUESTION])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cpu", action="append", default=[], help="processor of qemu-x86_64 (-cpu help), repeatable")
    parser.add_argument("--c-only", action="append", default=[], metavar="CPU",
                        help="the same with the program in C only: NumPy needs SSE4.2")  # fmt: skip
    args = parser.parse_args()
    qemu = shutil.which("qemu-x86_64")
    if (args.cpu or args.c_only) and qemu is None:
        print("error: --cpu needs qemu-x86_64 (Debian: apt install qemu-user)", file=sys.stderr)
        return 2
    if not args.wheel.is_file():
        print(f"error: {args.wheel} does not exist", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kvedge-wheel-") as folder:
        place = Place(Path(folder))
        install(place, args.wheel.resolve())
        program = compiled(place) if os.name == "posix" else None
        ask(place, program, "")
        if program is not None:
            refused(place, program)
        for cpu in args.cpu:
            place.emulator = [str(qemu), "-cpu", cpu]
            ask(place, program, f"{cpu}: ")
        for cpu in args.c_only if program else []:
            place.emulator = [str(qemu), "-cpu", cpu]
            ask_in_c(place, program, f"{cpu}: ")
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
