"""Finds plugins: files that the user names, and installed packages that have an entry point in group kvedge.plugins."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pykvedge.errors import KvedgeError, PluginError
from pykvedge.plans.plugins import calling, table

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pykvedge.plans.plan import Plan
    from pykvedge.plans.presets import Preset

GROUP = "kvedge.plugins"
LIBRARY_ENDINGS = (".so", ".dylib", ".dll")

_digests: dict[str, str] = {}  # names of plugin files, and digests of what was in them when they were loaded
_tried: dict[str, str] = {}  # entry points that were loaded, and what went wrong: "" for nothing


def load_file(path: Path) -> list[str]:
    """Registers what a plugin file (.py, or a shared library) brings. Returns the names of stages and presets.

    Raises PluginError: no such file, an error while it is read, a name that is taken, nothing registered.
    """
    path = path.expanduser()
    if not path.exists():
        raise PluginError(f"plugin {path} does not exist")
    if path.is_dir():
        raise PluginError(f"plugin {path} is a folder; pass the file")
    before = table.snapshot()
    try:
        if path.suffix in LIBRARY_ENDINGS:
            from pykvedge.plans.plugins import callbacks

            for plugin in callbacks.load_library(path):
                table.add(plugin)
        elif path.suffix == ".py":
            _run(path)
        else:
            raise PluginError(f"plugin {path} is neither a Python file (.py) nor a shared library (.so, .dylib, .dll)")
        names = _registered_by(path.name)
        if not names:
            raise PluginError(f"plugin {path} registers no scorer, allocator, reducer or preset")
        _check_presets(path.name)
    except BaseException:
        table.restore(before)
        raise
    _digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return names


def source_digest(plan: Plan) -> str:
    """Other for other versions of the plugin files that a plan's stages come from; "" if it has none from a file."""
    own = [table.get(stage, getattr(plan, stage)) for stage in table.STAGES]
    found = sorted({_digests[plugin.origin] for plugin in own if plugin is not None and plugin.origin in _digests})
    return " ".join(found)


def _run(path: Path) -> None:
    name = f"kvedge_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        calling.guarded(f"plugin {path.name}", spec.loader.exec_module, module, file=str(path))
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _registered_by(origin: str) -> list[str]:
    members, presets = table.snapshot()
    return [name for (_, name), p in members.items() if p.origin == origin] + [
        name for name, (_, of) in presets.items() if of == origin
    ]


def _check_presets(origin: str) -> None:
    from pykvedge.plans.presets import plan

    for name, (_, of) in table.snapshot()[1].items():
        if of == origin:
            try:
                plan(name)
            except PluginError:
                raise
            except (KvedgeError, TypeError) as error:
                raise PluginError(f"{origin}: preset '{name}': {error}") from None


# ---------------------------------------------------------------------------------------------------------


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


def load_installed(first: str = "") -> list[str]:
    """Loads entry points: the one called `first` alone if there is one, else all. Returns what went wrong."""
    points = _entry_points()
    for point in [points[first]] if first in points else points.values():
        _load_entry_point(point)
    return [problem for problem in _tried.values() if problem]


def find(stage: str, name: str) -> table.Plugin | None:
    """The member of that name, from what was registered or, failing that, from installed packages."""
    if stage in table.STAGES and isinstance(name, str) and table.get(stage, name) is None:
        load_installed(name)
        if table.get(stage, name) is None:
            load_installed()
    return table.get(stage, name)


def find_preset(name: str) -> Preset | None:
    """The preset of that name; or, if stages are called so, the method that they make with snapkv's other stages."""
    if not isinstance(name, str):
        return None
    for load in (None, name, ""):
        if load is not None:
            load_installed(load)
        if found := table.get_preset(name) or _implied(name):
            return found
    return None


def _implied(name: str) -> Preset | None:
    from pykvedge.plans.presets import Preset

    own = {stage: plugin for stage in table.STAGES if (plugin := table.get(stage, name)) is not None}
    if not own:
        return None
    first = next(iter(own.values()))
    values = {"scorer": "window", **dict.fromkeys(own, name)}
    return Preset(name, first.member.summary, f"{' and '.join(own)} of {first.origin}", values)


def problems() -> list[str]:
    """What went wrong with the installed plugins that were loaded so far, a line each."""
    return [problem for problem in _tried.values() if problem]


def method_names() -> list[str]:
    """Methods that plugins brought: their presets, and their stages by the names of which a method is implied."""
    return list(dict.fromkeys([*table.preset_names(), *(n for stage in table.STAGES for n in table.names(stage))]))
