"""Tests all of kvedge for another system: llama.cpp with kvedge, and examples/c/ask.c under the emulator.

The answer and the bytes of keys and values must equal those of this machine. Called by cross.py --whole.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from build_stock import cmake, find_build
from llama_source import ROOT, SourceError, log
from modelgen.tiny import write_tiny

if TYPE_CHECKING:
    from cross import Processor, Target

PROGRAM = "kvedge-ask"
DATA = ROOT / "pykvedge" / "data"
SCENE = ROOT / "examples" / "scene-1.png"
IMAGE_QUESTION = "Describe the image."
TEXT_QUESTION = "the quick brown fox jumps over the lazy dog and runs away"
TINY = ("llama", "qwen2vl", "qwen3", "phi3", "gemma3", "lfm2")
THREADS = "1"  # equal sums on all systems; threads would wait for each other on a busy machine


@dataclass(frozen=True)
class Outcome:
    """The output of a run of examples/c/ask.c."""

    answer: str
    figures: dict[str, str]

    def same_as(self, other: Outcome) -> list[str]:
        """Returns the names of differing values. Kernels may differ, and kept tokens with nearly equal scores."""
        names = sorted({*self.figures, *other.figures} - {"kernels", "kept"})
        differs = [name for name in names if self.figures.get(name) != other.figures.get(name)]
        return differs if self.answer == other.answer else ["answer", *differs]


def cases(folder: Path) -> dict[str, tuple[str, ...]]:
    """Returns {name: arguments of a question}: the packaged model with an image and three KV types, and tiny models
    with random weights.
    """
    demo = ("--mmproj", str(DATA / "demo-mmproj.gguf"), "--image", str(SCENE))
    asked = (str(DATA / "demo-model.gguf"), IMAGE_QUESTION)
    out = {f"demo model, {kind}": ("--kv-type", kind, *demo, *asked) for kind in ("f16", "q8_0", "q4_0")}
    for kind in TINY:
        model = write_tiny(kind, folder / kind)[0]
        # random weights: after a few tokens, rounding decides the next token
        out[f"tiny {kind}"] = ("--raw", "--max-tokens", "4", str(model), TEXT_QUESTION)
    return out


def ask(command: list[str]) -> Outcome:
    """Runs examples/c/ask.c. Raises SourceError when it fails."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8",
        errors="replace", check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    if done.returncode != 0 or not lines:
        raise SourceError(f"{' '.join(command)} ended with code {done.returncode}: {lines[-1] if lines else 'no word'}")
    return Outcome(done.stdout.strip(), dict(word.split("=", 1) for word in lines[-1].split() if "=" in word))


def build(folder: Path, options: dict[str, str]) -> Path:
    """Builds ask and its libraries in `folder`, and returns the program. Raises SourceError."""
    cmake(ROOT, folder, None if (folder / "build.ninja").is_file() else options, PROGRAM)
    found = [path for suffix in ("", ".exe") if (path := folder / "bin" / f"{PROGRAM}{suffix}").is_file()]
    if not found:
        raise SourceError(f"{folder} holds no {PROGRAM}; delete the folder and try again")
    return found[0]


def compare(name: str, here: Outcome, processor: Processor, command: list[str]) -> bool:
    """Runs a case under the emulator and prints a line. Returns whether the outcome equals `here`."""
    start = time.monotonic()
    there = ask(command)
    differs = there.same_as(here)
    kernels, took = there.figures["kernels"], time.monotonic() - start
    if processor.kernels and kernels != processor.kernels:
        differs.append(f"kernels (not {processor.kernels})")
    outcome = f"other {', '.join(differs)} than" if differs else "as"
    kept = "the same tokens kept" if there.figures["kept"] == here.figures["kept"] else "not all kept tokens the same"
    print(
        f"{processor.name} ({kernels}): {name}: {outcome} here ({here.figures['kernels']}), "
        f"KV bytes {there.figures['kv_bytes_before']} -> {there.figures['kv_bytes_after']}, "
        f"{kept}, {took:.0f} s",
        flush=True,
    )
    if differs:
        log(f"here:  {here}\nthere: {there}")
    return not differs


def run_whole(name: str, target: Target) -> int:
    """Builds for the target and compares. Returns the number of cases that differ. Raises SourceError."""
    native = build(find_build(), {})
    crossed = build(ROOT / "build" / "cross" / f"{name}-whole", {**target.cmake_options, **dict(target.whole_options)})
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for case, arguments in cases(Path(folder)).items():
            here = ask([str(native), "--threads", THREADS, *arguments])
            log(f"{case}: {here.answer}")
            for processor in target.processors:
                command = target.command(processor, crossed, "--threads", THREADS, *arguments)
                failed += processor.whole and not compare(case, here, processor, command)
    return failed
