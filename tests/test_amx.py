"""cmake/Amx.cmake enables AMX in a build only if a test program with llama.cpp's set-up of the tiles runs correctly."""

import platform
import re
import subprocess
import sys
from pathlib import Path

import llama_source
import pytest
from build_stock import tool
from conftest import ROOT

PLACE = "ggml/src/ggml-cpu/amx/mmq.cpp"
PROJECT = """
cmake_minimum_required(VERSION 3.21)
project(probe LANGUAGES C CXX)
set(CMAKE_BUILD_TYPE Release)
include({root}/cmake/Amx.cmake)
kvedge_amx({tree})
"""
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="AMX is tried under Linux on x86-64 only"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """llama.cpp's AMX code, with the mends applied."""
    out = tmp_path_factory.mktemp("source") / "llama.cpp"
    llama_source.prepare(out, llama_source.fetch(), ROOT / "patches", llama_source.MENDS)
    return (out / PLACE).read_text(encoding="utf-8")


@pytest.fixture
def decided(tmp_path):
    """decided(source, *options) -> (ON or OFF, reason)."""

    def decide(source: str, *options: str) -> tuple[str, str]:
        tree = tmp_path / "tree"
        (tree / PLACE).parent.mkdir(parents=True)
        (tree / PLACE).write_text(source, encoding="utf-8")
        (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT.as_posix(), tree=tree.as_posix()))
        command = [tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja",
                   f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *options]  # fmt: skip
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"AMX: (ON|OFF) \((.*)\)", done.stdout)
        assert found is not None, done.stdout
        return found[1], found[2]

    return decide


def machine_has_amx() -> bool:
    return "amx_int8" in Path("/proc/cpuinfo").read_text().split()


def test_llama_cpp_with_the_mend_is_proven_where_there_is_amx(decided, source):
    expected = ("ON", "a product of tiles is right") if machine_has_amx() else ("OFF", "has none to try it on")
    used, why = decided(source)
    assert used == expected[0] and expected[1] in why


def test_a_set_up_that_is_not_written_is_found(decided, source):
    """Some compilers drop the stores of the set-up: the tiles then have no rows."""
    broken = re.sub(r"tc\.rows\[\d\] = \d+; +tc\.colsb\[\d\] = \d+;", "", source)
    assert broken != source
    used, why = decided(broken)
    assert used == "OFF" and ("this compiler breaks it" in why if machine_has_amx() else "has none" in why)


def test_what_is_not_there_proves_nothing(decided):
    used, why = decided("// nothing\n")
    assert used == "OFF" and "set-up was not found" in why


@pytest.mark.parametrize("asked", ["ON", "OFF"])
def test_the_option_decides_untried(decided, source, asked):
    assert decided(source, f"-DKVEDGE_AMX={asked}") == (asked, f"KVEDGE_AMX={asked}")
