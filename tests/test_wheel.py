"""The tests of the wheel's command without a build of half an hour: builder's paths in files, and the old glibc."""

import ctypes
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import build_wheel
import check_cross_wheel
import pytest
import release
from cross import TARGETS, Processor, Target, Tool
from llama_source import SourceError

from pykvedge.native import libraries


@pytest.fixture
def wheel(tmp_path):
    def make(**files):
        path = tmp_path / "a-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path

    return make


def test_a_folder_of_the_builder_is_found(wheel):
    folder = Path("/builder/kvedge")
    made = wheel(
        inside=b"\x7fELF\0assert /builder/kvedge/native/a.cpp:3\0", whole=b"\0/builder/kvedge\0",
        other=b"/builder/kvedges /else/where builder/kvedge", none=b"native/a.cpp",
    )  # fmt: skip
    found = list(build_wheel.named_folders(made, [folder, Path("/else")]))
    assert found == [("inside", folder), ("whole", folder), ("other", Path("/else"))]


def test_the_builders_folders_are_those_of_this_machine():
    folders = build_wheel.builders_folders()
    assert build_wheel.ROOT in folders and Path.home() in folders and Path("/") not in folders


def test_one_wheel_or_an_error(wheel, tmp_path):
    with pytest.raises(SourceError, match="holds 0 wheels"):
        build_wheel.only(tmp_path)
    assert build_wheel.only(wheel(a=b"").parent) == tmp_path / "a-1-py3-none-any.whl"


def test_a_wheel_is_packed_again_with_nothing_else_changed(tmp_path):
    made, wheel = tmp_path / "a.whl", tmp_path / "b.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for name, mode in (("pykvedge/", 0o40755), ("pykvedge/lib.so", 0o100755), ("empty", 0o100644)):
            info = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            info.external_attr, info.compress_type = mode << 16, 0 if name.endswith("/") else zipfile.ZIP_DEFLATED
            content = "wheel " * 9999 if "lib" in name else ""
            archive.writestr(info, content, compresslevel=1)

    def smaller(content):
        squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
        return squeeze.compress(content) + squeeze.flush()

    build_wheel.packed(made, wheel, smaller)
    assert zipfile.ZipFile(wheel).testzip() is None and wheel.stat().st_size < made.stat().st_size
    assert list(release.members(wheel).items()) == list(release.members(made).items())


def test_a_wheel_is_tried_on_the_system_of_its_name():
    told = check_cross_wheel.target_of
    assert told(Path("kvedge-1-py3-none-manylinux_2_27_aarch64.whl")) is TARGETS["aarch64"]
    assert told(Path("kvedge-1-py3-none-win_amd64.whl")) is TARGETS["mingw"]
    for name in ("kvedge-1-py3-none-manylinux_2_27_x86_64.whl", "kvedge-1-win_amd64.tar.gz"):
        with pytest.raises(SourceError, match="is no wheel for one of aarch64, win_amd64"):
            told(Path(name))


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("g++"), reason="needs Linux and g++")
def test_a_wheels_program_answers_with_the_kernels_of_the_processor(tmp_path, capsys):
    # this system replaces the other one: installed files in the form of a wheel, and `env` as the emulator
    package = tmp_path / "pykvedge"
    (package / "lib").mkdir(parents=True)
    for made in [*libraries.in_package(""), libraries.require_dir()]:
        for entry in made.iterdir():
            link = (package / "lib" if made.name == "lib" else package) / entry.name
            if entry.name != "lib" and not link.exists():
                link.symlink_to(entry)
    here = Target("", Tool(("g++",), ""), Tool(("env",), ""), (Processor("this"), Processor("older", kernels="none")))
    with pytest.raises(SourceError, match="older: it says '64UM3' with "):
        check_cross_wheel.answers(package, here)
    assert capsys.readouterr().out.startswith("this (")


NEW_THINGS = """
#include <cmath>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
// functions that moved or changed after glibc 2.27 and GCC 7, random bytes, a clock of 2.30, and an exception
extern "C" double answer(const char * path) {
    std::mutex mutex;
    std::condition_variable told;
    std::unique_lock<std::mutex> lock(mutex);
    told.wait_for(lock, std::chrono::milliseconds(1));
    double result = 0;
    std::thread([&] { result = std::pow(2.0, std::log2(40.0)); }).join();
    try {
        std::ostringstream out;
        std::random_device random;
        if (random() == random() && random() == random()) return 0;
        out << std::filesystem::file_size(path);
        throw std::runtime_error(out.str());
    } catch (const std::exception & error) {
        return result + std::stod(error.what());
    }
}
"""


def newest(library: Path) -> dict[str, tuple[int, ...]]:
    """Returns the newest version of each family that a library needs."""
    needs = subprocess.run(["readelf", "-V", str(library)], capture_output=True, text=True, check=True).stdout
    found: dict[str, tuple[int, ...]] = {}
    for family, number in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", needs.partition("Version needs")[2]):
        found[family] = max(found.get(family, ()), tuple(map(int, number.split("."))))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("g++"), reason="needs Linux and g++")
def test_a_library_asks_for_an_old_glibc(tmp_path):
    source, file, folder = tmp_path / "a.cpp", tmp_path / "two", tmp_path / "old"
    source.write_text(NEW_THINGS)
    file.write_bytes(b"xy")
    script = Path(build_wheel.__file__).with_name("old_glibc.py")
    subprocess.run([sys.executable, str(script), str(folder), "g++"], check=True)
    compiled = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", str(source)]
    old = ["-o", str(tmp_path / "old.so"), f"-L{folder}", "-Wl,--exclude-libs,ALL", "-Wl,--no-undefined"]
    subprocess.run([*compiled, *old], check=True)
    subprocess.run([*compiled, "-o", str(tmp_path / "new.so")], check=True)
    asked, usual = newest(tmp_path / "old.so"), newest(tmp_path / "new.so")
    assert usual["GLIBC"] > (2, 27) and usual["GLIBCXX"] > (3, 4, 24)  # otherwise this test shows nothing
    assert asked["GLIBC"] <= (2, 27) and asked["GLIBCXX"] <= (3, 4, 24) and asked.get("CXXABI", ()) <= (1, 3, 11)
    function = ctypes.CDLL(str(tmp_path / "old.so")).answer
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_char_p]
    assert function(bytes(file)) == pytest.approx(42)
