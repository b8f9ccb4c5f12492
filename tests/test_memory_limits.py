"""Under a small limit of address space, `kvedge chat` answers, or prints one error line with exit code 1 or 2."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from choosing import whole
from conftest import ROOT

PICTURE = ("--image", str(ROOT / "examples" / "scene-1.png"), "How many shapes are there?")
PATIENCE_S = 120


@dataclass(frozen=True)
class Run:
    """The result of a run under a limit."""

    code: int
    out: str
    err: str

    @property
    def answered(self) -> bool:
        return self.code == 0 and bool(self.out.strip())

    @property
    def refused(self) -> bool:
        """Returns whether the run printed one error line and nothing else."""
        lines = self.err.splitlines()
        return self.code in (1, 2) and not self.out and len(lines) == 1 and lines[0].startswith("kvedge: error: ")


def run(
    limit: int, arguments: Sequence[str] = PICTURE, environment: dict[str, str] | None = None, stack: int = 8 << 20
) -> Run:
    """Runs `kvedge chat` with `limit` bytes of address space, of which each thread takes `stack`."""
    import resource

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    done = subprocess.run(
        [sys.executable, "-m", "pykvedge", "chat", *arguments], preexec_fn=bound, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return Run(done.returncode, done.stdout, done.stderr)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of the address space")


@linux
@pytest.mark.parametrize("megabytes", [290, 420, *whole(*(n for n in range(200, 610, 10) if n not in (290, 420)))])
def test_too_little_address_space_is_one_line(environment, native, megabytes):
    """Limits where ggml would assert (from 280 MB), between two checks (400), and just before the answer."""
    ended = run(megabytes * 10**6, environment=environment)
    assert ended.answered or ended.refused, ended
    assert ended.answered or "memory" in ended.err, ended


@linux
@pytest.mark.parametrize("gigabytes", [1, 2, 3, 5])
def test_a_refused_thread_is_one_line(environment, native, gigabytes):
    """Each thread takes `gigabytes` of 6 GB for its stack, so one of Python's or of ggml's first threads is refused."""
    environment = {**environment, "OPENBLAS_NUM_THREADS": "1"}  # NumPy would need a thread, too
    ended = run(6 * 10**9, (*PICTURE, "--threads", "2"), environment, gigabytes * 10**9)
    assert ended.answered or ended.refused, ended
    assert ended.answered or "memory" in ended.err, ended


@linux
def test_enough_address_space_is_an_answer(environment, native):
    assert run(700 * 10**6, environment=environment).answered


@linux
def test_text_alone_needs_less(environment, native, tiny):
    arguments = [*tiny("llama").arguments(), "--max-tokens", "2", "Hello there."]
    for megabytes in (260, 340):
        ended = run(megabytes * 10**6, arguments, environment)
        assert ended.answered or ended.refused, (megabytes, ended)
    assert ended.answered
