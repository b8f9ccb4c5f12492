"""Where the folders of the installed package lie, and kvedge's copy of llama_cpp.

This is all that importing pykvedge runs, so it imports nothing that takes time, as pathlib does.
"""

from __future__ import annotations

import os
import sys


def in_package(name: str) -> list[str]:
    """Lists where a folder of the package may lie."""
    # an editable install spreads the package over two folders: the sources, and the one with what was built
    return [f"{folder}{os.sep}{name}" for folder in sys.modules["pykvedge"].__path__]


def bindings_dir() -> str | None:
    """Finds the folder of kvedge's copy of llama_cpp. None in a source tree that was never installed."""
    places = in_package("bindings")
    return next((place for place in places if os.path.isdir(f"{place}/llama_cpp")), None)  # noqa: PTH112


def prepare() -> None:
    """Makes kvedge's copy of llama_cpp the one that imports find, unless one was imported already."""
    place = bindings_dir()
    if place is not None and (not sys.path or sys.path[0] != place):
        sys.path.insert(0, place)
