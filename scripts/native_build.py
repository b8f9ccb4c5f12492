"""Builds native/ by itself: for sanitizers and other systems. A folder per set of options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from build_stock import tool
from llama_source import ROOT, SourceError

# arguments with which tests run some of their cases: under an emulator or the thread sanitizer all of them take minutes
FEWER = {"test_attention": ["3"]}


def build_native(name: str, targets: list[str], **options: str) -> Path:
    """Builds `targets` of native/ with CMake options into build/native/NAME; the folder of the programs.

    Raises SourceError when a tool is missing or the build fails.
    """
    folder = ROOT / "build" / "native" / name
    cmake = tool("cmake")
    configure = [cmake, "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *(f"-D{key}={value}" for key, value in options.items())]
    for command in (configure, [cmake, "--build", str(folder), "--target", *targets]):
        # stdout is for the result
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            raise SourceError(f"the build in {folder} failed; its messages are above")
    return folder / "bin"
