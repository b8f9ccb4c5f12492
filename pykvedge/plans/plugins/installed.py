"""Loads plugins of installed packages (entry points in group kvedge.plugins) when a name is unknown."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pykvedge.errors import PluginError
from pykvedge.plans.plugins import calling, table
from pykvedge.plans.plugins.table import Preset

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kvedge.plugins"
_tried: dict[str, str] = {}  # name of a loaded entry point -> error text, "" for none


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
    """Loads the entry point called `first`, or all entry points if there is no such one. See `problems` for errors."""
    points = _entry_points()
    for point in [points[first]] if first in points else points.values():
        _load_entry_point(point)


def find(stage: str, name: str) -> table.Plugin | None:
    """Returns the registered member called `name`; loads entry points if needed. Returns None for an unknown name."""
    if stage in table.STAGES and isinstance(name, str) and table.get(stage, name) is None:
        load_installed(name)
        if table.get(stage, name) is None:
            load_installed()
    return table.get(stage, name)


def find_preset(name: str) -> Preset | None:
    """Returns the preset called `name`, or a preset made of snapkv and the registered stages called `name`, or None."""
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
    """Returns one line per installed plugin that failed to load."""
    return [problem for problem in _tried.values() if problem]


def method_names() -> list[str]:
    """Returns the methods of plugins: presets, and stages that are methods by themselves."""
    return list(dict.fromkeys([*table.preset_names(), *(n for stage in table.COMPRESSING for n in table.names(stage))]))
