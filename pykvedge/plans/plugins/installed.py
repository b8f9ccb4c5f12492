"""Installed packages have plugins by entry points in group kvedge.plugins, loaded when a name is not known."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pykvedge.errors import PluginError
from pykvedge.plans.plugins import calling, table
from pykvedge.plans.plugins.table import Preset

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kvedge.plugins"
_tried: dict[str, str] = {}  # entry points that were loaded, and what went wrong: "" for nothing


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    from importlib import metadata

    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _load_entry_point(point: EntryPoint) -> None:
    if point.name in _tried:
        return
    _tried[point.name] = ""
    before = table.snapshot()
    try:
        calling.guarded(f"plugin '{point.name}' ({point.value})", point.load, file=None)
    except PluginError as error:
        table.restore(before)
        _tried[point.name] = str(error)


def load_installed(first: str = "") -> None:
    """Loads entry points: the one called `first` alone if there is one, else all. `problems` says what went wrong."""
    points = _entry_points()
    for point in [points[first]] if first in points else points.values():
        _load_entry_point(point)


def find(stage: str, name: str) -> table.Plugin | None:
    """Finds the member of that name, from what was registered or, failing that, from installed packages."""
    if stage in table.STAGES and isinstance(name, str) and table.get(stage, name) is None:
        load_installed(name)
        if table.get(stage, name) is None:
            load_installed()
    return table.get(stage, name)


def find_preset(name: str) -> Preset | None:
    """Finds the preset of that name; or, if stages are called so, the method they make with snapkv's other stages."""
    if not isinstance(name, str):
        return None
    for load in (None, name, ""):
        if load is not None:
            load_installed(load)
        if found := table.get_preset(name) or _implied(name):
            return found
    return None


def _implied(name: str) -> Preset | None:
    own = {stage: plugin for stage in table.COMPRESSING if (plugin := table.get(stage, name)) is not None}
    if not own:
        return None
    first = next(iter(own.values()))
    values = {"scorer": "window", **dict.fromkeys(own, name)}
    return Preset(name, first.member.summary, f"{' and '.join(own)} of {first.origin}", values)


def problems() -> list[str]:
    """Tells what went wrong with the installed plugins that were loaded so far, a line each."""
    return [problem for problem in _tried.values() if problem]


def method_names() -> list[str]:
    """Lists the methods that plugins brought: their presets, and the stages whose names imply a method."""
    return list(dict.fromkeys([*table.preset_names(), *(n for stage in table.COMPRESSING for n in table.names(stage))]))
