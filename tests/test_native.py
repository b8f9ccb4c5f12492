"""Runs the programs of native/tests, built by `scripts/dev.py test` (or the CMake target kvedge-tests)."""

import os
import subprocess
from pathlib import Path

import build_stock
import native_build
import pytest
from choosing import whole
from llama_source import SourceError

SOURCES = sorted((Path(__file__).resolve().parent.parent / "native" / "tests").glob("test_*.cpp"))
# the address sanitizer (scripts/sanitize.py) runs all cases
FEWER_CASES = {"test_attention": ["5"], "test_faults": ["9"], "test_measure": ["CPU", "3"], "test_session": ["25"]}


@pytest.mark.parametrize("name", [p.stem for p in SOURCES])
def test_native(name):
    try:
        program = build_stock.find_build() / "bin" / (name + (".exe" if os.name == "nt" else ""))
    except SourceError as error:
        pytest.skip(str(error))
    if not program.is_file():
        pytest.skip("native tests are not built: python3 scripts/dev.py test builds them")
    done = subprocess.run(
        [program, *FEWER_CASES.get(name, [])], capture_output=True, text=True, errors="replace", timeout=600
    )
    assert done.returncode == 0, f"{name} ended with code {done.returncode}\n{done.stdout}{done.stderr}"


def test_lists_of_tests_name_tests():
    named = {*native_build.FEWER_CASES, *native_build.THREADED, *native_build.MACHINE_DEPENDENT}
    assert named <= {path.stem for path in SOURCES}


@pytest.mark.parametrize("kinds", [["llama"], *whole(["llama", "gemma3"])], ids=" ".join)
def test_the_glue_through_llama_cpp(tiny, tmp_path, kinds):
    """Runs the public C interface with several threads and models. scripts/sanitize.py runs it with both models."""
    program = build_stock.find_build() / "bin" / ("kvedge-glue-tests" + (".exe" if os.name == "nt" else ""))
    if not program.is_file():
        pytest.skip("native tests are not built: python3 scripts/dev.py test builds them")
    models = [tiny(kind, **native_build.GLUE_SHAPE).model for kind in kinds]
    done = subprocess.run(
        [program, tmp_path, *models], capture_output=True, text=True, errors="replace", timeout=600,
        env={**os.environ, "KVEDGE_FAULTS_EVERY": "17"},
    )  # fmt: skip
    assert done.returncode == 0, f"kvedge-glue-tests ended with code {done.returncode}\n{done.stdout}{done.stderr}"
