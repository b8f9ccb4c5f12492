"""Loads plugins that users name: Python files and shared libraries."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import CodeType

from pykvedge.errors import KvedgeError, PluginError
from pykvedge.plans.making import plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugins import calling, table
from pykvedge.system.files import require_file

LIBRARY_ENDINGS = (".so", ".dylib", ".dll")


class _Source(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now. Cached bytecode can belong to an older text of the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


_digests: dict[str, str] = {}  # name of a plugin file -> digest of its content when it was loaded


def load_file(path: Path) -> list[str]:
    """Registers the stages and presets of a plugin file (.py or a shared library). Returns their names.

    Raises PluginError: the file is missing or fails, a name is taken, or nothing is registered.
    """
    try:
        path = path.expanduser()
        require_file(path)
    except FileNotFoundError:
        raise PluginError(f"plugin {path} does not exist") from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: the home folder is unknown
        raise PluginError(f"plugin {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    before = table.snapshot()
    try:
        if path.suffix in LIBRARY_ENDINGS:
            from pykvedge.plans.plugins import shared_library

            for plugin in shared_library.load_library(path):
                table.add(plugin)
        elif path.suffix == ".py":
            _run(path)
        else:
            raise PluginError(f"plugin {path} is neither a Python file (.py) nor a shared library (.so, .dylib, .dll)")
        members, presets = table.snapshot()
        methods = [name for name, (_, origin) in presets.items() if origin == path.name]
        names = [*(name for (_, name), plugin in members.items() if plugin.origin == path.name), *methods]
        if not names:
            raise PluginError(f"plugin {path} registers no scorer, allocator, reducer, pruner or preset")
        for method in methods:
            _check_preset(path.name, method)
    except BaseException:
        table.restore(before)
        raise
    _digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return names


def source_digest(plan: Plan) -> str:
    """Returns a digest that changes with the plugin files of a plan's stages; "" without such files."""
    own = [table.get(stage, getattr(plan, stage)) for stage in table.STAGES]
    found = sorted({_digests[plugin.origin] for plugin in own if plugin is not None and plugin.origin in _digests})
    return " ".join(found)


def _run(path: Path) -> None:
    name = f"kvedge_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module of a class
    try:
        calling.guarded(f"plugin {path.name}", spec.loader.exec_module, module, file=str(path))
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _check_preset(origin: str, name: str) -> None:
    try:
        plan(name)
    except PluginError:
        raise
    except (KvedgeError, TypeError) as error:
        raise PluginError(f"{origin}: preset '{name}': {error}") from None
