"""Builds the native tests for another system, and runs them under an emulator.

    python3 scripts/dev.py cross aarch64        64-bit ARM under Linux, by qemu
    python3 scripts/dev.py cross mingw          64-bit Windows, by wine
    python3 scripts/dev.py cross NAME --fewer   only tests that depend on the processor or the system, as in CI
    python3 scripts/dev.py cross NAME --whole   llama.cpp with kvedge for that system, and examples/c/ask.c under the
                                                emulator: its answer must be the answer of this machine

The tests are a build of native/ without llama.cpp (build/native/NAME). Each test runs on the emulator's first
processor. The kernel test runs on all processors, and checks the kernels that each processor must choose.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llama_source import ROOT, SourceError, ended
from native_build import FEWER_CASES, MACHINE_DEPENDENT, build_native
from wine import windows

KERNELS = "test_kernels"  # its argument: the kernel table that must be chosen
AT_ONCE = 4  # tests wait for the disk and for their threads half of the time


@dataclass(frozen=True)
class Tool:
    """A program: its possible names, and the Debian package that contains it."""

    names: tuple[str, ...]
    package: str

    @property
    def path(self) -> str | None:
        """Returns the path of the program; None: it is missing."""
        return next(filter(None, map(shutil.which, self.names)), None)


@dataclass(frozen=True)
class Processor:
    """A processor that an emulator can play."""

    name: str
    arguments: tuple[str, ...] = ()  # arguments of the emulator
    kernels: str = ""  # the kernel table that must be chosen; empty: any table
    whole: bool = True  # whether it can run the target's build of llama.cpp


@dataclass(frozen=True)
class Target:
    """A system that this machine can build for."""

    toolchain: str  # a file in cmake/toolchains
    compiler: Tool
    emulator: Tool
    processors: tuple[Processor, ...]
    options: tuple[tuple[str, str], ...] = ()  # options of CMake
    whole_options: tuple[tuple[str, str], ...] = ()  # options of CMake for llama.cpp

    @property
    def cmake_options(self) -> dict[str, str]:
        """Returns the options of CMake for any build for the target."""
        toolchain = ROOT / "cmake" / "toolchains" / self.toolchain
        return {"CMAKE_TOOLCHAIN_FILE": str(toolchain), "CMAKE_BUILD_TYPE": "Release", **dict(self.options)}

    def require_tools(self) -> None:
        """Raises SourceError with the packages to install when a tool is missing."""
        missing = [tool for tool in (self.compiler, self.emulator) if not tool.path]
        if missing:
            names = " and ".join(" or ".join(tool.names) for tool in missing)
            packages = " ".join(tool.package for tool in missing)
            raise SourceError(f"{names} missing; on Debian: apt-get install {packages}")

    def command(self, processor: Processor, program: Path, *arguments: str) -> list[str]:
        """Returns the command that runs a program of the target under the emulator."""
        return [str(self.emulator.path), *processor.arguments, str(program), *arguments]


ARM_LIBRARIES = ("-L", "/usr/aarch64-linux-gnu")

TARGETS = {
    "aarch64": Target(
        toolchain="aarch64-linux-gnu.cmake",
        compiler=Tool(("aarch64-linux-gnu-g++",), "g++-aarch64-linux-gnu"),
        emulator=Tool(("qemu-aarch64", "qemu-aarch64-static"), "qemu-user"),
        processors=(
            # qemu's largest processor without long vectors (SVE), which kvedge does not use
            Processor("max", (*ARM_LIBRARIES, "-cpu", "max,sve=off"), "neoni8mm"),
            Processor("neoverse-n1", (*ARM_LIBRARIES, "-cpu", "neoverse-n1"), "neondot"),
            Processor("cortex-a53", (*ARM_LIBRARIES, "-cpu", "cortex-a53"), "neon", whole=False),
        ),
        whole_options=(("GGML_NATIVE", "OFF"), ("GGML_CPU_ARM_ARCH", "armv8.2-a+dotprod")),
    ),
    "mingw": Target(
        toolchain="mingw-w64.cmake",
        compiler=Tool(("x86_64-w64-mingw32-g++-posix",), "g++-mingw-w64-x86-64"),
        emulator=Tool(("wine64", "wine", "/usr/lib/wine/wine64"), "wine64"),
        processors=(Processor("wine"),),
        whole_options=(("GGML_NATIVE", "OFF"),),
    ),
}


def run_test(target: Target, processor: Processor, program: Path) -> bool:
    """Runs one test program and prints its name and outcome. Returns whether it passed."""
    own_kernels = program.stem == KERNELS and processor.kernels
    arguments = [processor.kernels] if own_kernels else FEWER_CASES.get(program.stem, [])
    done = subprocess.run(
        target.command(processor, program, *arguments),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        check=False,
    )  # fmt: skip
    passed = done.returncode == 0
    if not passed:
        sys.stderr.write(done.stdout + done.stderr)
    chosen = f" ({processor.kernels})" if program.stem == KERNELS and arguments else ""
    outcome = "passed" if passed else f"failed with exit code {done.returncode}"
    print(f"{processor.name}: {program.stem}{chosen} {outcome}", flush=True)
    return passed


def run_tests(name: str, fewer: bool) -> int:
    """Builds and runs the native tests of a target. Returns the number of failed tests. Raises SourceError."""
    target = TARGETS[name]
    programs = build_native(name, list(MACHINE_DEPENDENT) if fewer else ["kvedge-tests"], **target.cmake_options)
    found = sorted(p for p in programs.glob("test_*") if p.suffix in ("", ".exe"))
    tests = [p for p in found if p.stem in MACHINE_DEPENDENT or not fewer]
    kernels = [p for p in tests if p.stem == KERNELS]
    if not kernels:
        raise SourceError(f"{programs} holds no tests")
    first, *others = target.processors
    runs = [(first, p) for p in tests] + [(processor, p) for processor in others for p in kernels]
    runs.sort(key=lambda run: run[1].stem not in FEWER_CASES)  # the longest first
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(not passed for passed in pool.map(lambda run: run_test(target, *run), runs))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="cross", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("target", metavar="NAME", choices=TARGETS, help=" or ".join(TARGETS))
    parser.add_argument("--fewer", action="store_true", help="the tests of what differs by processor or system")
    parser.add_argument("--whole", action="store_true", help="all of kvedge instead of the native tests")
    args = parser.parse_args()
    TARGETS[args.target].require_tools()
    emulator = str(TARGETS[args.target].emulator.path)
    with windows(emulator) if args.target == "mingw" else contextlib.nullcontext():
        if args.whole:
            from cross_whole import run_whole

            failed = run_whole(args.target, TARGETS[args.target])
        else:
            failed = run_tests(args.target, args.fewer)
    if failed:
        raise SourceError(f"{failed} failed; what they said is above")


if __name__ == "__main__":
    sys.exit(ended(main))
