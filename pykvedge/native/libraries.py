"""Finds and loads kvedge's shared libraries, and imports its copy of the llama_cpp bindings on top of them."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

from pykvedge.errors import LibraryError
from pykvedge.native import backends, carried, libcheck
from pykvedge.native.abi import ABI_VERSION, Error

BINDINGS_VERSION = "0.3.36"  # pinned in scripts/llama_source.py
HOW_TO_BUILD = libcheck.REINSTALL
IMPORT_FIRST = "write 'import pykvedge' before 'import llama_cpp'"
# libraries below libkvedge, dependencies first; loading by path keeps the system from finding other copies
_BELOW = ("ggml-base", "ggml-cpu", "ggml", "llama")
_VARIABLES = ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB")  # environment variables that redirect the bindings


def file_name(base: str) -> str:
    """Returns the file name of a shared library on this system. libkvedge's name includes its ABI version."""
    if sys.platform == "win32":
        return f"{base}.dll"
    version = f".{ABI_VERSION}" if base == "kvedge" else ""
    return f"lib{base}{version}.dylib" if sys.platform == "darwin" else f"lib{base}.so{version}"


@functools.cache
def library_dir() -> Path | None:
    """Returns the folder of libllama, libmtmd and libkvedge: KVEDGE_LIB_DIR, or lib/ of the installed package."""
    override = os.environ.get("KVEDGE_LIB_DIR")
    for place in [Path(override)] if override else in_package("lib"):
        if (place / file_name("llama")).exists():
            return place.resolve()
    return None


def in_package(name: str) -> list[Path]:
    """Returns the possible places of a package folder."""
    return [Path(place) for place in carried.in_package(name)]


def require_dir() -> Path:
    """Returns the folder of kvedge's libraries. Raises LibraryError if the folder is missing."""
    place = library_dir()
    if place is None:
        where = os.environ.get("KVEDGE_LIB_DIR")
        found = f"KVEDGE_LIB_DIR={where} has no {file_name('llama')}" if where else "kvedge's libraries are missing"
        raise LibraryError(f"{found}; {HOW_TO_BUILD}")
    return place


@functools.cache
def load(base: str) -> ctypes.CDLL:
    """Loads one of kvedge's libraries. Raises LibraryError with the reason and the remedy."""
    place = require_dir()
    libcheck.check_cpu(place)
    path = place / file_name(base)
    if not path.exists():
        raise LibraryError(f"{path} is missing; {HOW_TO_BUILD}")
    libcheck.check_machine(path)
    if sys.platform == "win32":
        os.add_dll_directory(str(place))
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise libcheck.explain(path, str(error)) from None


def folder_with(base: str) -> Path:
    """Returns the folder of lib`base` to kvedge's copy of llama_cpp during its import. Raises LibraryError."""
    load_backends()
    load(base)
    return require_dir()


@functools.cache
def kvedge() -> ctypes.CDLL:
    """Loads libkvedge and the libraries below it, without the bindings. Raises LibraryError, as `llama` does."""
    _refuse_others(require_dir())
    return _kvedge()


def _kvedge() -> ctypes.CDLL:
    place = require_dir()
    for base in _BELOW:
        if (place / file_name(base)).exists():
            load(base)
    libkvedge = load("kvedge")
    try:
        libcheck.check_version(libkvedge, ABI_VERSION)
        libkvedge.kvedge_load_backends.restype = ctypes.c_int
    except AttributeError as lacking:
        raise LibraryError(f"libkvedge has another version ({lacking}); {HOW_TO_BUILD}") from None
    return libkvedge


@functools.cache
def load_backends() -> None:
    """Makes ggml load its CPU variant, if variants are separate libraries, and the backends of installed packages.

    Raises LibraryError.
    """
    error = Error()
    if _kvedge().kvedge_load_backends(ctypes.byref(error)) != 0:
        raise LibraryError(error.text)
    backends.load(require_dir(), load)


@functools.cache
def llama() -> Any:
    """Imports the bindings llama_cpp.llama_cpp on top of kvedge's libraries.

    Raises LibraryError if the libraries are missing or unusable, or if another llama_cpp was imported first.
    """
    place = require_dir()
    _refuse_others(place)
    carried.prepare()
    load_backends()
    bindings = _imported("llama_cpp.llama_cpp")
    _check_origin(bindings._lib._name, place / file_name("llama"))
    return bindings


@functools.cache
def mtmd() -> Any:
    """Imports the bindings llama_cpp.mtmd_cpp on top of kvedge's libraries. Raises LibraryError."""
    llama()
    bindings = _imported("llama_cpp.mtmd_cpp")
    _check_origin(bindings._libmtmd._name, require_dir() / file_name("mtmd"))
    return bindings


def _imported(name: str) -> Any:
    try:
        __import__(name)
    except ImportError as error:
        raise LibraryError(f"the llama_cpp bindings cannot be imported: {error}; {HOW_TO_BUILD}") from None
    except (OSError, RuntimeError, AttributeError) as error:
        raise LibraryError(f"llama_cpp cannot load the libraries in {require_dir()}: {error}") from None
    return sys.modules[name]


def _refuse_others(place: Path) -> None:
    """Raises LibraryError for a foreign llama.cpp: two in one process would call each other's functions."""
    for variable in _VARIABLES:
        wanted = os.environ.get(variable)
        if wanted is not None and Path(wanted).resolve() != place:
            raise LibraryError(
                f"{variable} is {wanted}, but kvedge needs its own libraries in {place}: unset {variable} "
                "(to use another build of kvedge, set KVEDGE_LIB_DIR)"
            )
    module = sys.modules.get("llama_cpp")
    if module is not None:
        version = getattr(module, "__version__", None)
        if version not in (None, BINDINGS_VERSION):
            where = Path(getattr(module, "__file__", None) or "llama_cpp").parent
            raise LibraryError(
                f"llama_cpp {version} ({where}) was imported first; "
                f"kvedge needs its own, {BINDINGS_VERSION}: {IMPORT_FIRST}"
            )
        inner = sys.modules.get("llama_cpp.llama_cpp")
        if loaded := getattr(getattr(inner, "_lib", None), "_name", None):
            _check_origin(loaded, place / file_name("llama"))


def _check_origin(loaded: str, ours: Path) -> None:
    if Path(loaded).resolve() != ours.resolve():
        raise LibraryError(
            f"llama_cpp was imported first and loaded {loaded}; kvedge needs its own in {ours.parent}: {IMPORT_FIRST}"
        )
