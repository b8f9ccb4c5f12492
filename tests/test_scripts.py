"""Scripts that print figures start, and say what they are for: nothing that they import has gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
FIGURES = sorted(p.name for kind in ("measure_*", "check_*", "compare_*", "make_*") for p in SCRIPTS.glob(f"{kind}.py"))


@pytest.mark.parametrize("name", FIGURES)
def test_explains_itself(environment, native, name):
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, "--help"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "usage:" in done.stdout and len(done.stdout) > 200
