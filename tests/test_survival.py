"""The effect of a crash in the libraries on a test run."""

import subprocess
import sys

from conftest import ROOT

CRASHES = """
import os, signal
import pytest

def test_before(): pass

@pytest.mark.parametrize("how", [signal.SIGILL, signal.SIGSEGV, signal.SIGABRT])
def test_ends_the_process(how): os.kill(os.getpid(), how)

def test_after(): pass

def test_fails(): assert False
"""


def test_a_crash_fails_one_test_and_the_run_goes_on(tmp_path):
    """With the options in pyproject.toml."""
    (tmp_path / "test_crashes.py").write_text(CRASHES)
    (tmp_path / "test_others.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p",
               "no:cacheprovider", "-n", "1", tmp_path]  # fmt: skip
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1, done
    assert "4 failed, 4 passed" in done.stdout.splitlines()[-1]
    for name in ("SIGILL", "SIGSEGV", "SIGABRT"):
        signal_number = {"SIGILL": 4, "SIGSEGV": 11, "SIGABRT": 6}[name]
        assert f"test_ends_the_process[{signal_number}]" in done.stdout
    assert done.stdout.count("crashed while running") >= 3
