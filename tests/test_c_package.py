"""The package for C: installed, moved, and used by programs without the build folder."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import build_stock
import pytest
from choosing import whole
from conftest import ROOT

from pykvedge.native import abi, cpackage, libraries

EXAMPLES = ROOT / "examples" / "c"
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
CXX = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
PKG_CONFIG = shutil.which("pkg-config")
QUESTION, TOKENS = "What is this?", 12
STAGES = ["--scorer", "modal", "--allocator", "ada", "--reducer", "nearest"]
KEPT = ["--method", "snapkv", *STAGES, "--budget", "0.2"]  # the plan of picture.c
FIGURES = re.compile(r"picture: (\d+) tokens, (\d+) of them image: (\d+) bytes of keys and values, then (\d+)\n")
FAKE = 77  # exit code of a program that loaded a wrong library

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="paths in the libraries are those of Linux and macOS"),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF libraries and Linux' loader")


def done(command, **options) -> str:
    """Runs a command that must succeed. Returns its stdout."""
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert run.returncode == 0, (command, run.stdout[-2000:], run.stderr[-2000:])
    return run.stdout


def installed(folder: Path, *components: str) -> Path:
    """Installs components of the present build, and moves them to a folder with a space in its name."""
    command = [build_stock.tool("cmake"), "--install", build_stock.find_build(), "--prefix", folder / "first"]
    for chosen in [["--component", name] for name in components] or [[]]:
        done([*command, *chosen])
    (folder / "first").rename(folder / "moved here")
    return folder / "moved here"


@pytest.fixture(scope="module")
def package(native, tmp_path_factory):
    """The installed package for C."""
    return installed(tmp_path_factory.mktemp("package"), "kvedge-runtime", "kvedge-dev")


@pytest.fixture(scope="module")
def wheel(native, tmp_path_factory):
    """The libraries and headers of a wheel: its pykvedge folder."""
    return installed(tmp_path_factory.mktemp("wheel"), "kvedge") / "pykvedge"


@pytest.fixture(scope="module")
def builds(package, wheel, environment, tmp_path_factory):
    """builds(way) -> the program of picture.c, built in one of three ways. Each way is built once."""
    made: dict[str, Path] = {}

    def by_cmake(out: Path, where: str) -> None:
        folder, cmake = out.with_suffix(".build"), build_stock.tool("cmake")
        tools = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={build_stock.tool('ninja')}", f"-DCMAKE_C_COMPILER={COMPILER}"]
        done([cmake, "-S", EXAMPLES, "-B", folder, *tools, "-DCMAKE_C_FLAGS=-Werror", where])
        done([cmake, "--build", folder, "-j", "1"])
        out.symlink_to(folder / "kvedge-picture")

    def by_flags(out: Path, flags: str) -> None:
        strict = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
        done([COMPILER, *strict, "-o", out, EXAMPLES / "picture.c", *shlex.split(flags)])

    def make(way: str) -> Path:
        if way in made:
            return made[way]
        out = made[way] = tmp_path_factory.mktemp(way) / "picture"
        if way == "cmake":
            by_cmake(out, f"-DCMAKE_PREFIX_PATH={package}")
        elif way == "cmake, wheel":
            by_cmake(out, f"-Dkvedge_DIR={wheel / 'lib' / 'cmake' / 'kvedge'}")
        elif way == "pkg-config":
            if PKG_CONFIG is None:
                pytest.skip("no pkg-config")
            plain = out.with_name("plain")
            plain.symlink_to(package)  # pkg-config splits a name with a space
            search = {**os.environ, "PKG_CONFIG_PATH": str(plain / "lib" / "pkgconfig")}
            by_flags(out, done([PKG_CONFIG, "--cflags", "--libs", "kvedge"], env=search))
        else:
            by_flags(out, done([sys.executable, "-m", "pykvedge", "--cflags", "--libs"], env=environment))
        return out

    return make


WAYS = ["cmake", "python", *whole("cmake, wheel", "pkg-config")]


@pytest.fixture(scope="module")
def asked(tiny, picture_file):
    """asked(program, *more, **environment) -> the finished program, with a tiny model and a picture."""
    model = tiny("qwen2vl")

    def run(program, *more, tokens=TOKENS, **variables):
        command = [program, model.model, model.mmproj, picture_file(), QUESTION, tokens, *more]
        env = {**os.environ, **variables}
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=env, timeout=300, check=False
        )

    return run


@pytest.fixture(scope="module")
def answer(kvedge, tiny, picture_file):
    """The report of `kvedge chat` for the same question."""
    picture = ["--image", picture_file(), "--max-tokens", TOKENS, "--json"]
    report = kvedge("chat", *tiny("qwen2vl").arguments(), *KEPT, *picture, QUESTION).json
    assert report["kv"]["kept_bytes"] < report["kv"]["full_bytes"] / 2 and len(report["text"]) > TOKENS
    return report


def same(run, answer) -> None:
    assert run.returncode == 0, run
    assert run.stdout.rstrip("\n") == answer["text"].rstrip("\n")
    found = [int(number) for number in FIGURES.fullmatch(run.stderr).groups()]
    tokens, kv = answer["tokens"], answer["kv"]
    assert found == [tokens["prompt"], tokens["image"], kv["full_bytes"], kv["kept_bytes"]]


@pytest.mark.parametrize("way", WAYS)
def test_the_example_answers_as_the_program_does(builds, asked, answer, way):
    same(asked(builds(way)), answer)


# --------------------------------------------------------------------------------------------- installed files


def test_the_wheel_has_the_headers_and_libraries_of_the_package(package, wheel):
    def names(folder):
        return {p.name for p in folder.iterdir() if p.is_file()}

    ours = {p.name for p in (ROOT / "native" / "include").glob("*.h")}
    assert names(package / "include" / "kvedge") == names(wheel / "include") > ours | {"llama.h", "ggml.h", "mtmd.h"}
    assert [p.name for p in (package / "include").iterdir()] == ["kvedge"]
    assert not [p for p in (package / "lib").iterdir() if p.is_file()]
    here, there = names(package / "lib" / "kvedge"), names(wheel / "lib")
    link = {name for name in here if (package / "lib" / "kvedge" / name).is_symlink()}
    chat = libraries.file_name("kvedge-chat")  # only in the Python package
    assert here - link == there - {chat} and chat in there and len(link) <= 1
    assert not [p for p in wheel.rglob("*") if p.is_symlink()]  # a wheel would store a copy


def test_without_a_component_the_package_for_c_is_installed(package, tmp_path):
    def names(folder):
        return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))

    assert names(installed(tmp_path)) == names(package)


@pytest.mark.parametrize("language", ["c", "c++"])
def test_every_header_compiles_by_itself(package, tmp_path, language):
    compiler, dialect = (COMPILER, "c11") if language == "c" else (CXX, "c++17")
    if compiler is None:
        pytest.skip(f"no {language} compiler")
    folder = package / "include" / "kvedge"
    left_out = set() if language == "c++" else {"ggml-cpp.h", "ggml-openvino.h", "llama-cpp.h"}  # C++ only
    for header in sorted(p.name for p in folder.glob("*.h") if p.name not in left_out):
        source = tmp_path / f"a.{'c' if language == 'c' else 'cpp'}"
        source.write_text(f"#include <{header}>\n")
        done([compiler, f"-std={dialect}", "-fsyntax-only", "-I", folder, source])


def test_no_file_names_the_build(package, wheel):
    build = build_stock.find_build().resolve()
    named = {str(folder) for folder in (ROOT, build, Path.home())} | {"/first"}
    texts = [p for place in (package, wheel) for end in ("*.pc", "*.cmake") for p in (place / "lib").rglob(end)]
    assert len(texts) == 10  # kvedge.pc, kvedge-config, its version file, the targets and those of the build type
    for path in texts:
        assert not [name for name in named if name in path.read_text()], path


def dynamic(library: Path) -> dict[str, list[str]]:
    """Returns the entries of an ELF file's dynamic section: {name: values}."""
    found: dict[str, list[str]] = {}
    for kind, value in re.findall(r"\((\w+)\).*\[(.*)\]", done(["readelf", "-d", "-W", library])):
        found.setdefault(kind, []).append(value)
    return found


@LINUX
def test_libraries_look_beside_themselves_first(package, wheel):
    build = str(build_stock.find_build().resolve())
    for folder in (package / "lib" / "kvedge", wheel / "lib"):
        for library in (p for p in folder.glob("lib*.so*")):
            entries = dynamic(library)
            assert entries["RPATH"][0].split(":")[0] == "$ORIGIN" and "RUNPATH" not in entries, library
            assert build not in entries["RPATH"][0]
        versioned = f"libkvedge.so.{abi.ABI_VERSION}"
        assert dynamic(folder / versioned)["SONAME"] == [versioned] == [libraries.file_name("kvedge")]
    assert (package / "lib" / "kvedge" / "libkvedge.so").readlink() == Path(versioned)


@LINUX
@pytest.mark.parametrize("way", WAYS)
def test_another_llama_cpp_on_the_search_path_is_not_taken(package, builds, asked, answer, tmp_path, way):
    fake, source = tmp_path / "fake", tmp_path / "fake.c"
    fake.mkdir()
    source.write_text(
        f"#include <stdlib.h>\n__attribute__((constructor)) static void loaded(void) {{ _Exit({FAKE}); }}\n"
    )
    done([COMPILER, "-shared", "-fPIC", "-o", fake / "libllama.so", source])
    folder = package / "lib" / "kvedge"
    for library in folder.glob("lib*.so*"):
        if library.name != "libllama.so":
            shutil.copy(fake / "libllama.so", fake / library.name)
    same(asked(builds(way), LD_LIBRARY_PATH=str(fake)), answer)
    # the fake library ends a program that loads it
    source.write_text("#include <llama.h>\nint main(void) { llama_backend_init(); return 0; }\n")
    flags = ["-I", package / "include" / "kvedge", folder / "libllama.so", f"-Wl,-rpath,{folder}"]
    program = tmp_path / "fooled"
    done([COMPILER, "-o", program, source, *flags, "-Wl,--enable-new-dtags", f"-Wl,-rpath-link,{folder}"])
    fooled = subprocess.run([program], env={**os.environ, "LD_LIBRARY_PATH": str(fake)}, check=False)
    assert fooled.returncode == FAKE


# --------------------------------------------------------------------------------------------- CMake and versions


def test_cmake_refuses_a_version_that_this_is_not(package, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(asks LANGUAGES C)\n"
        "find_package(kvedge 99 QUIET)\nmessage(STATUS \"newer: ${kvedge_FOUND}\")\n"
        "find_package(kvedge 0.1 REQUIRED)\nmessage(STATUS \"this: ${kvedge_FOUND} ${kvedge_ABI_VERSION}\")\n"
        "get_target_property(folder kvedge::kvedge INTERFACE_INCLUDE_DIRECTORIES)\nmessage(STATUS \"in: ${folder}\")\n"
    )  # fmt: skip
    command = [build_stock.tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={package}"]
    said = done([*command, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={build_stock.tool('ninja')}"])
    assert "newer: 0\n" in said and f"this: 1 {abi.ABI_VERSION}\n" in said
    assert f"in: {package / 'include' / 'kvedge'}\n" in said


# --------------------------------------------------------------------------------------------- the program


def test_ctrl_c_ends_the_answer(builds, tiny, picture_file):
    model = tiny("qwen2vl")
    command = [builds("cmake"), model.model, model.mmproj, picture_file(), QUESTION, 100000]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = subprocess.Popen(list(map(str, command)), **pipes)
    with program:
        assert program.stdout.read(1)  # the program answers
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert program.returncode == 130 and out.endswith(b"\n")
    assert err.splitlines()[-1] == b"picture: cancelled"


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({1: "nowhere.gguf"}, 1, "picture: error: nowhere.gguf: it cannot be loaded"),
        ({2: "nowhere.gguf"}, 1, "picture: error: nowhere.gguf: it cannot be loaded as the model's image encoder"),
        ({3: "nowhere.png"}, 1, "picture: error: nowhere.png: it cannot be read; use png, jpg or bmp"),
        ({5: "many"}, 2, "picture MODEL.gguf MMPROJ.gguf IMAGE QUESTION"),
        ({5: "0"}, 2, "picture MODEL.gguf MMPROJ.gguf IMAGE QUESTION"),
    ],
)
def test_what_is_wrong_is_said(builds, tiny, picture_file, change, code, said):
    model = tiny("qwen2vl")
    command = [builds("cmake"), model.model, model.mmproj, picture_file(), QUESTION, "2"]
    for place, word in change.items():
        command[place] = word
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout) == (code, "") and run.stderr.splitlines()[-1].startswith(said)
    if 1 in change:  # llama.cpp's log, through the callback
        assert len(run.stderr.splitlines()) > 1 and "failed to open GGUF file" in run.stderr


# --------------------------------------------------------------------------------------------- the flags


def test_flags_name_what_is_there(kvedge, native):
    both, alone = kvedge("--cflags", "--libs"), [kvedge("--cflags"), kvedge("--libs")]
    assert both.code == 0 and both.err == "" and both.out == f"{alone[0].out.strip()} {alone[1].out}"
    words = shlex.split(both.out)
    assert (Path(words[0].removeprefix("-I")) / "kvedge.h").is_file()
    linked = [Path(word) for word in words if word.startswith("/")]
    assert linked[0].name == libraries.file_name("kvedge") and len(linked) == 5 and all(p.is_file() for p in linked)
    found = kvedge("--cmake-dir").out
    assert (Path(found.strip()) / "kvedge-config.cmake").is_file()
    assert kvedge("--cmake-dir", "--libs").out == alone[1].out + found


def test_flags_of_a_folder_with_a_blank_stay_words(wheel, monkeypatch):
    monkeypatch.setattr(cpackage, "in_package", lambda name: [wheel / "nowhere", wheel / name])
    cflags, libs = cpackage.flags("Cflags"), cpackage.flags("Libs")
    assert cflags == [f"-I{wheel / 'include'}"] and f"-Wl,-rpath,{wheel / 'lib'}" in libs
    assert shlex.split(cpackage.for_shell(libs)) == libs and cpackage.cmake_dir().is_relative_to(wheel)


def test_flags_that_cannot_be_told(kvedge, tmp_path):
    kvedge("--cflags", "methods").failed(2, "cannot be combined with the command methods")
    kvedge("--").failed(2, "Missing command")
    bare = "import sys, pykvedge.native.cpackage as c; c.in_package = lambda name: []\n"
    bare += "from pykvedge.__main__ import main"
    for flag in ("--cflags", "--libs", "--cmake-dir"):
        code = f"{bare}\nsys.argv = ['kvedge', '{flag}']\nmain()"
        kvedge(program=("-c", code)).failed(1, "kvedge.pc is missing", "reinstall kvedge")
