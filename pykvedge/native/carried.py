"""Finds the folders of the installed package, and makes imports find kvedge's copy of llama_cpp.

Every `import pykvedge` runs this module, so it imports nothing slow, not even pathlib.
"""

from __future__ import annotations

import os
import sys


def in_package(name: str) -> list[str]:
    """Returns the possible places of a package folder."""
    # an editable install has two folders: the sources, and the built files
    return [f"{folder}{os.sep}{name}" for folder in sys.modules["pykvedge"].__path__]


def bindings_dir() -> str | None:
    """Returns the folder of kvedge's copy of llama_cpp, or None in a source tree without installation."""
    places = in_package("bindings")
    return next((place for place in places if os.path.isdir(f"{place}/llama_cpp")), None)  # noqa: PTH112


def prepare() -> None:
    """Puts kvedge's copy of llama_cpp first in the import path. An earlier import stays."""
    place = bindings_dir()
    if place is not None and (not sys.path or sys.path[0] != place):
        sys.path.insert(0, place)
