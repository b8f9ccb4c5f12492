"""Builds for other systems: missing tools are named, and outputs there are compared with this machine's."""

import subprocess
import sys
from pathlib import Path

import pytest
from cross import TARGETS
from cross_whole import Outcome

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
FIGURES = {"kernels": "avx2", "kv_bytes_before": "1000", "kv_bytes_after": "200", "kept": "0123abcd"}


@pytest.mark.parametrize("name", TARGETS)
def test_missing_tools_are_named_with_their_packages(tmp_path, environment, name):
    command = [sys.executable, SCRIPTS / "cross.py", name]
    # programs are found only by their full path
    bare = {**environment, "PATH": str(tmp_path)}
    done = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout and done.stderr.count("\n") == 1
    assert "apt-get install" in done.stderr and TARGETS[name].compiler.package in done.stderr


def test_a_target_that_does_not_exist(environment):
    command = [sys.executable, SCRIPTS / "cross.py", "vax"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "aarch64" in done.stderr


def test_outcomes_are_equal_but_for_the_kernels():
    here = Outcome("a red circle", FIGURES)
    assert here.same_as(Outcome("a red circle", {**FIGURES, "kernels": "neondot"})) == []
    assert here.same_as(Outcome("a red square", FIGURES)) == ["answer"]
    assert here.same_as(Outcome("a red circle", {**FIGURES, "kv_bytes_after": "232"})) == ["kv_bytes_after"]
    assert here.same_as(Outcome("a red circle", {"kernels": "avx2"})) == ["kv_bytes_after", "kv_bytes_before"]
