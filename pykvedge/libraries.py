"""Finding kvedge's shared libraries, and the llama_cpp bindings on top of them.

`prepare` is what importing pykvedge does: it sets where llama_cpp is to look, and loads nothing, except in builds whose
CPU variants are separate libraries, which must be in the process before any model is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pykvedge.errors import LibraryError

HOW_TO_BUILD = "reinstall kvedge, or set KVEDGE_LIB_DIR to the folder of a development build"


def file_name(base: str) -> str:
    """What a shared library is called on this system."""
    if sys.platform == "win32":
        return f"{base}.dll"
    return f"lib{base}.dylib" if sys.platform == "darwin" else f"lib{base}.so"


@functools.cache
def library_dir() -> Path | None:
    """The folder with libllama, libmtmd and libkvedge: KVEDGE_LIB_DIR, or lib/ in the installed package."""
    package = sys.modules["pykvedge"]
    override = os.environ.get("KVEDGE_LIB_DIR")
    # an editable install spreads the package over two folders: the sources, and the one with the libraries
    places = [Path(override)] if override else [Path(p) / "lib" for p in package.__path__]
    for place in places:
        if (place / file_name("llama")).exists():
            return place.resolve()
    return None


def prepare() -> None:
    """Tells llama_cpp, before it is imported, to load our libllama and libmtmd. Does nothing if they are missing."""
    place = library_dir()
    if place is not None:
        os.environ["LLAMA_CPP_LIB_PATH"] = os.environ["MTMD_CPP_LIB"] = str(place)
        with suppress(OSError, AttributeError):  # what is wrong with them is said when they are used
            load_backends()


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SILENCE = _LOG(lambda level, text, data: None)


@functools.cache
def load_backends() -> None:
    """Makes ggml load its CPU variants, where those are separate libraries."""
    place = require_dir()
    if any(place.glob(file_name("ggml-cpu-*"))):
        log = ctypes.CDLL(str(place / file_name("ggml-base"))).ggml_log_set
        log.argtypes, log.restype = [_LOG, ctypes.c_void_p], None
        load = ctypes.CDLL(str(place / file_name("ggml"))).ggml_backend_load_all_from_path
        load.argtypes, load.restype = [ctypes.c_char_p], None
        log(_SILENCE, None)  # ggml greets every variant that it loads
        load(os.fsencode(place))


def require_dir() -> Path:
    """The folder of our libraries. Raises LibraryError when there is none."""
    place = library_dir()
    if place is None:
        where = os.environ.get("KVEDGE_LIB_DIR")
        found = f"KVEDGE_LIB_DIR={where} holds no {file_name('llama')}" if where else "kvedge's libraries are missing"
        raise LibraryError(f"{found}; {HOW_TO_BUILD}")
    return place


@functools.cache
def llama() -> Any:
    """The llama_cpp.llama_cpp bindings on top of our libraries.

    Raises LibraryError when they are missing, or when llama_cpp was imported before pykvedge and loaded others.
    """
    place = require_dir()
    prepare()
    if sys.platform == "win32":
        os.add_dll_directory(str(place))
    try:
        import llama_cpp.llama_cpp as bindings
    except ImportError as error:
        raise LibraryError(f"the llama-cpp-python bindings cannot be imported: {error}") from None
    except (OSError, RuntimeError, AttributeError) as error:
        raise LibraryError(f"llama_cpp cannot load the libraries in {place}: {error}") from None
    _check_origin(bindings._lib._name, place)
    return bindings


@functools.cache
def mtmd() -> Any:
    """The llama_cpp.mtmd_cpp bindings on top of our libraries. Raises LibraryError."""
    llama()
    try:
        import llama_cpp.mtmd_cpp as bindings
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise LibraryError(f"the mtmd library cannot be loaded: {error}; {HOW_TO_BUILD}") from None
    _check_origin(bindings._libmtmd._name, require_dir())
    return bindings


def _check_origin(loaded: str, place: Path) -> None:
    if Path(loaded).resolve().parent != place:
        raise LibraryError(
            f"llama_cpp was imported first and loaded {loaded}; kvedge needs its own in {place}: "
            "write 'import pykvedge' before 'import llama_cpp'"
        )
