"""Returns what a C compiler needs from the installed package (kvedge.pc): headers, libraries, CMake folder."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pykvedge.errors import LibraryError
from pykvedge.native.libraries import in_package


def flags(field: str) -> list[str]:
    """Returns the words of a field of kvedge.pc, "Cflags" or "Libs". Raises LibraryError."""
    path = _folder() / "pkgconfig" / "kvedge.pc"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LibraryError(f"{path} cannot be read: {error.strerror}; reinstall kvedge") from None
    values = {"pcfiledir": path.parent.as_posix()}
    for line in lines:
        if variable := re.match(r"(\w+)=(.*)", line):
            values[variable[1]] = posixpath.normpath(_filled(variable[2], values))
        elif line.startswith(f"{field}:"):
            # splits into words before it fills in folder names, which may contain blanks
            return [_filled(word, values) for word in shlex.split(line.removeprefix(f"{field}:"))]
    raise LibraryError(f"{path} has no {field}; reinstall kvedge")


def cmake_dir() -> Path:
    """Returns the folder of kvedge-config.cmake, for CMake's kvedge_DIR. Raises LibraryError."""
    return _folder() / "cmake" / "kvedge"


def for_shell(words: list[str]) -> str:
    """Returns a line that the system's shell splits into these words."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def _folder() -> Path:
    # ignores KVEDGE_LIB_DIR: its libraries may not match the headers of this package
    for place in in_package("lib"):
        if (place / "pkgconfig" / "kvedge.pc").is_file():
            return place.resolve()
    raise LibraryError("kvedge.pc is missing, so this installation of kvedge is incomplete; reinstall kvedge")


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda name: values[name[1]], text)
