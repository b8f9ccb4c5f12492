"""kvedge's libraries and the bindings on top of them: any import order, and the messages when they cannot be used. Each
case runs in a separate process, because a process can load only one llama.cpp.
"""

import functools
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import llama_source
import pytest
from choosing import whole

import pykvedge
from pykvedge.native import carried, libcheck, libraries

COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF libraries and Linux' loader")
USE = (
    "from pykvedge.library import libkvedge; from pykvedge.native import libraries\n"
    "try:\n"
    "    libkvedge.simd(); print(libraries.llama()._lib._name)\n"
    "except pykvedge.LibraryError as error: print('error:', error)\n"
)


@pytest.fixture
def said(started):
    """said(code, **variables) -> the one line that a Python process with these variables prints."""

    def run(code, **variables):
        done = started(program=("-c", code), env=variables)
        assert done.code == 0 and done.err == "" and len(done.out.splitlines()) == 1, done
        return done.out.strip()

    return run


@pytest.fixture
def folder(native, tmp_path, monkeypatch):
    """A folder with links to kvedge's libraries. A test can replace the links."""
    place = tmp_path / "lib"
    place.mkdir()
    for path in libraries.require_dir().iterdir():
        (place / path.name).symlink_to(path)
    return place


@pytest.fixture(scope="module")
def their_llama_cpp(tmp_path_factory, stock_dir, environment):
    """their_llama_cpp(version) -> PYTHONPATH with a user's llama-cpp-python and its libraries."""

    @functools.cache
    def make(version=llama_source.VERSION):
        place = tmp_path_factory.mktemp("theirs")
        llama_source.unpack(llama_source.fetch(), place, llama_source.BINDINGS)
        init = place / "llama_cpp" / "__init__.py"
        init.write_text(init.read_text().replace(llama_source.VERSION, version))
        shutil.copytree(stock_dir, place / "llama_cpp" / "lib")
        return os.pathsep.join([str(place), environment["PYTHONPATH"]])

    return make


def replace(path, content):
    path.unlink()
    path.write_bytes(content)


def library(tmp_path, name, code, *options):
    """Builds a shared library of C code. Returns its file."""
    source = tmp_path / f"{name}.c"
    source.write_text(code)
    out = tmp_path / name
    command = [COMPILER, "-shared", "-fPIC", "-o", out, source, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


# ------------------------------------------------------------------------------------------------- import order


@pytest.mark.parametrize("imports", ["pykvedge, llama_cpp", "llama_cpp, pykvedge", "llama_cpp.mtmd_cpp, pykvedge"])
def test_the_order_of_the_imports_does_not_matter(said, native, imports):
    ours = [str(libraries.require_dir() / libraries.file_name(name)) for name in ("llama", "mtmd")]
    both = USE.replace("print(libraries", "from llama_cpp import mtmd_cpp; print(mtmd_cpp._libmtmd._name, libraries")
    assert said(f"import {imports}\n{both}").split() == ours[::-1]


def test_the_bindings_alone_run_a_model(said, native, tiny):
    code = (
        "from llama_cpp import Llama\n"
        f"llm = Llama({str(tiny('llama').model)!r}, n_ctx=64, n_threads=1, verbose=False)\n"
        "print(llm('Hello', max_tokens=3)['usage']['completion_tokens'])"
    )
    assert 1 <= int(said(code)) <= 3


def test_importing_changes_nothing_for_other_processes(said, native):
    code = "import os; before = dict(os.environ); import pykvedge, llama_cpp; print(before == dict(os.environ))"
    assert said(code) == "True"


def test_a_llama_cpp_of_the_users_is_not_used_and_not_touched(said, native, their_llama_cpp):
    theirs = their_llama_cpp()
    ours = said(f"import pykvedge, llama_cpp\n{USE}", PYTHONPATH=theirs)
    assert ours == str(libraries.require_dir() / libraries.file_name("llama"))
    code = "import llama_cpp; print(llama_cpp.llama_cpp._lib._name)"
    assert said(code, PYTHONPATH=theirs).startswith(theirs.split(os.pathsep)[0])


def test_a_llama_cpp_with_its_own_library_imported_first(said, native, their_llama_cpp):
    line = said(f"import llama_cpp, pykvedge\n{USE}", PYTHONPATH=their_llama_cpp())
    assert line.startswith("error: llama_cpp was imported first and loaded ")
    assert line.endswith("write 'import pykvedge' before 'import llama_cpp'")


def test_attach_refuses_a_model_of_another_llama_cpp(said, native, tiny, their_llama_cpp):
    code = (
        "import llama_cpp, pykvedge\n"
        f"llm = llama_cpp.Llama({str(tiny('llama').model)!r}, n_ctx=64, n_threads=1, verbose=False)\n"
        "try: pykvedge.attach(llm)\n"
        "except pykvedge.LibraryError as error: print(error)\n"
    )
    assert "was imported first" in said(code, PYTHONPATH=their_llama_cpp())


def test_a_llama_cpp_of_another_version(said, native, their_llama_cpp):
    theirs = their_llama_cpp("0.3.20")
    line = said(f"import llama_cpp, pykvedge\n{USE}", PYTHONPATH=theirs)
    assert line.startswith("error: llama_cpp 0.3.20 (") and f"needs its own, {llama_source.VERSION}" in line
    assert "write 'import pykvedge' before" in line
    ours = said(f"import pykvedge, llama_cpp\n{USE}", PYTHONPATH=theirs)
    assert ours == str(libraries.require_dir() / libraries.file_name("llama"))


def test_the_bindings_are_of_the_pin():
    assert libraries.BINDINGS_VERSION == llama_source.VERSION
    place = Path(carried.bindings_dir())
    assert f'__version__ = "{llama_source.VERSION}"' in (place / "llama_cpp" / "__init__.py").read_text()


# ------------------------------------------------------------------------------------------------- variables


@pytest.mark.parametrize(("variable", "imports"), [
    ("LLAMA_CPP_LIB_PATH", "llama_cpp, pykvedge"), ("MTMD_CPP_LIB", "pykvedge"),
    *whole(("LLAMA_CPP_LIB_PATH", "pykvedge"), ("MTMD_CPP_LIB", "llama_cpp, pykvedge")),
])  # fmt: skip
def test_the_bindings_variables_that_name_other_libraries(said, native, stock_dir, variable, imports):
    line = said(f"import {imports}\n{USE}", **{variable: str(stock_dir)})
    assert line.startswith(f"error: {variable} is {stock_dir}, but kvedge needs its own libraries in ")
    assert f"unset {variable}" in line


def test_the_bindings_variables_in_the_program(kvedge, native, stock_dir, tiny):
    chat = ["chat", *tiny("llama").arguments(), "--max-tokens", 1, "Hello"]
    kvedge(*chat, env={"LLAMA_CPP_LIB_PATH": str(stock_dir)}).failed(1, "LLAMA_CPP_LIB_PATH is", "unset")
    assert kvedge(*chat, env={"LLAMA_CPP_LIB_PATH": str(libraries.require_dir())}).code == 0


# ------------------------------------------------------------------------------------------------- libraries


def test_the_libraries_are_built_for_this_processor(native):
    recorded = (libraries.require_dir() / libcheck.FEATURES_FILE).read_text().split()
    assert recorded[0] == libcheck.this_machine()
    if libcheck.cpu_features() is not None:
        assert set(recorded[1:]) <= libcheck.cpu_features()


@LINUX
def test_libraries_of_another_processor(kvedge, folder, tiny):
    other = next(name for name in ("fma4", "xop", "sve2", "amx_fp16") if name not in libcheck.cpu_features())
    replace(folder / libcheck.FEATURES_FILE, f"{libcheck.this_machine()} {other}\n".encode())
    chat = ["chat", *tiny("llama").arguments(), "--max-tokens", 1, "Hello"]
    done = kvedge(*chat, env={"KVEDGE_LIB_DIR": str(folder)})
    done.failed(1, f"built for a processor with {other}, which this processor lacks", "scripts/dev.py build")


@LINUX
def test_a_library_of_another_architecture(said, folder):
    path = folder / libraries.file_name("ggml-base")
    head = bytearray(path.read_bytes()[:4096])
    other, name = (183, "aarch64") if libcheck.this_machine() == "x86_64" else (62, "x86_64")
    struct.pack_into("<H", head, 18, other)
    replace(path, bytes(head))
    line = said(f"import pykvedge\n{USE}", KVEDGE_LIB_DIR=str(folder))
    assert line.startswith(f"error: {path} is built for {name}, but this machine is {libcheck.this_machine()}")


@LINUX
@pytest.mark.parametrize("content", [b"", b"not a library at all, but text"])
def test_a_file_that_is_no_library(said, folder, content):
    replace(folder / libraries.file_name("llama"), content)
    line = said(f"import pykvedge\n{USE}", KVEDGE_LIB_DIR=str(folder))
    assert line.startswith("error: ") and "is not a shared library of this system" in line


@LINUX
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_a_library_of_a_newer_system(said, folder, tmp_path):
    """The library needs a version that this system's C library lacks."""
    versions = tmp_path / "versions"
    versions.write_text("GLIBC_2.99 { global: from_the_future; local: *; };\n")
    later = ["-nostdlib", "-Wl,-soname,libc.so.6", f"-Wl,--version-script={versions}"]
    libc = library(tmp_path, "later-libc.so", "int from_the_future(void) { return 1; }\n", *later)
    code = "int from_the_future(void);\nint ggml_it(void) { return from_the_future(); }\n"
    needs = library(tmp_path, "base.so", code, "-nostdlib", libc)
    replace(folder / libraries.file_name("ggml-base"), needs.read_bytes())
    line = said(f"import pykvedge\n{USE}", KVEDGE_LIB_DIR=str(folder))
    assert line.startswith("error: libggml-base.so needs a newer C library (glibc) than this system")
    assert "version 2.99 or later; " in line and "scripts/dev.py build" in line


@LINUX
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("name", "how"), [("libstdc++.so.99", "apt install libstdc++6"), ("libunheard.so.1", "scripts/dev.py build")]
)
def test_a_library_of_the_system_is_missing(said, folder, tmp_path, name, how):
    gone = library(tmp_path, name, "int away(void) { return 1; }\n", f"-Wl,-soname,{name}")
    code = "int away(void);\nint ggml_it(void) { return away(); }\n"
    needs = library(tmp_path, "base.so", code, gone)
    gone.unlink()
    replace(folder / libraries.file_name("ggml-base"), needs.read_bytes())
    line = said(f"import pykvedge\n{USE}", KVEDGE_LIB_DIR=str(folder))
    assert line.startswith(f"error: libggml-base.so needs {name}, which is missing: ") and how in line


def test_a_library_that_numpy_needs_is_missing(environment, started, tmp_path):
    said = "libstdc++.so.6: cannot open shared object file: No such file or directory"
    (tmp_path / "numpy.py").write_text(f"raise ImportError('Importing NumPy failed.\\nOriginal error was: {said}')\n")
    done = started("chat", "hello", env={"PYTHONPATH": os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])})
    done.failed(1, "kvedge needs libstdc++.so.6, which is missing: apt install libstdc++6")


@LINUX
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("abi", "version", "why"),
    [
        (1, "9.9.9", "has version 9.9.9, but the Python package has version"),
        (77, "0.1.0", "has ABI version 77"),
        (1, pykvedge.__version__, "undefined symbol: kvedge_load_backends"),
    ],
)
def test_a_libkvedge_of_another_version(said, folder, tmp_path, abi, version, why):
    code = f"int kvedge_abi_version(void) {{ return {abi}; }}\n"
    code += f'const char * kvedge_version(void) {{ return "{version}"; }}\n'
    replace(folder / libraries.file_name("kvedge"), library(tmp_path, "other.so", code).read_bytes())
    line = said(f"import pykvedge\n{USE}", KVEDGE_LIB_DIR=str(folder))
    assert line.startswith("error: ") and why in line and "reinstall kvedge" in line


def test_a_library_is_missing(said, folder):
    (folder / libraries.file_name("kvedge")).unlink()
    line = said(f"import pykvedge\n{USE}", KVEDGE_LIB_DIR=str(folder))
    assert line.startswith("error: ") and f"{libraries.file_name('kvedge')} is missing; reinstall kvedge" in line


def test_backends_can_be_loaded_again(native):
    from pykvedge.native.calls import call

    call("load_backends")
    call("load_backends")
