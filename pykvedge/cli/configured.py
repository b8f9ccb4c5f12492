"""The values of omitted options: from the environment, then from the configuration file.

Settings have the names of options: `--gpu-layers` is KVEDGE_GPU_LAYERS in the environment, and gpu-layers in the file.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from pykvedge.errors import KvedgeError, KvedgeWarning, UsageError, unknown
from pykvedge.system.files import is_there, require_file

TALKING = ("chat", "run", "serve", "fit")  # commands that take every setting for which they have an option
PLACES = ("model", "mmproj", "threads", "gpu-layers", "device", "rpc")  # the only settings of commands that measure
# a parameter that is given nearer to the user -> the settings that it replaces
_REPLACED = {
    "model": ("model", "mmproj"), "models": ("model", "mmproj"), "hf_repo": ("model", "mmproj"),
    "hf_repos": ("model", "mmproj"), "file": ("model", "mmproj"), "plan_file": ("method", "budget"),
    **dict.fromkeys(("stream", "bounded", "question_blind"), ("keep", "keep-folder", "keep-space", "keep-type")),
}  # fmt: skip
_IN_EFFECT = "kvedge.configured"
_OTHERS = tuple(f"KVEDGE_{name}" for name in (
    "CONFIG", "DEBUG", "LIB_DIR", "COMPLETE", "LLAMA_", "CACHE_DIR", "STOCK_DIR", "BUILD", "AMX", "PORTABLE", "PCH",
    "MUTANT", "WORKER", "PROGRAM", "PICTURES", "RPC_OPERATIONS", "THREAD_ROUNDS", "COVERAGE", "FUZZ",
))  # variables that are no settings, of builds and tests, too  # fmt: skip


class Setting(NamedTuple):
    """A value, and its source: a variable or the file."""

    value: Any
    source: str


def file() -> Path:
    """Returns the path of the configuration file: KVEDGE_CONFIG, else the system's usual place."""
    if named := os.environ.get("KVEDGE_CONFIG"):
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:
        raise UsageError(
            "the home folder cannot be found; set KVEDGE_CONFIG to the path of the configuration file"
        ) from None
    if sys.platform == "win32":
        folder = Path(os.environ.get("APPDATA") or home / "AppData" / "Roaming")
    elif sys.platform == "darwin":
        folder = home / "Library" / "Application Support"
    else:
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return folder / "kvedge" / "config.toml"


def stored() -> dict[str, Any]:
    """Returns the settings in the file; {} without a file. Raises UsageError for a file that is not TOML."""
    path = file()
    try:
        if not is_there(path):
            return {}
        require_file(path)
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"the configuration {path} is not TOML: {error}; correct the file, or remove it") from None


def parsed(text: str) -> dict[str, Any]:
    """Parses TOML. Raises ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def settings(known: Iterable[str]) -> dict[str, Setting]:
    """Returns all settings; variables override the file. Raises UsageError for an unknown key of the file."""
    names, path, found = set(known), file(), {}
    for key, value in stored().items():
        if key not in names:
            raise unknown(
                "key", key, names, [f"{key} is set in {path}; `kvedge config unset {key}` removes the setting"]
            )
        if not isinstance(value, (str, int, float)):
            raise UsageError(f"{key} in {path} must be a text, a number, true or false")
        found[key] = Setting(value, str(path))
    for key in names:
        if value := os.environ.get(variable(key)):
            if key == "model":
                found.pop("mmproj", None)  # it belongs to the file's model
            found[key] = Setting(value, variable(key))
    return found


def _warn_of_unknown(names: Iterable[str]) -> None:
    """Warns about KVEDGE_ variables that nothing reads, except variables of builds and tests."""
    known = {variable(key) for key in names}
    for name in sorted(os.environ):
        if name.startswith("KVEDGE_") and name not in known and not name.startswith(_OTHERS):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"did you mean {near[0]}?" if near else "`kvedge config` lists the settings"
            warnings.warn(
                f"the environment variable {name} is not a setting of kvedge; {hint}", KvedgeWarning, stacklevel=2
            )


def variable(key: str) -> str:
    return "KVEDGE_" + key.upper().replace("-", "_")


def keys(command: click.Command) -> dict[str, click.Parameter]:
    """Returns setting -> option, for the settings that a command takes."""
    found = {param.opts[0].strip("-"): param for param in command.params if getattr(param, "config", False)}
    return {key: param for key, param in found.items() if command.name in TALKING or key in PLACES}


def all_keys(root: click.Command) -> dict[str, list[tuple[click.Command, click.Parameter]]]:
    """Returns setting -> (command, option), for the settings of this command and all commands below."""
    found: dict[str, list[tuple[click.Command, click.Parameter]]] = {}
    for key, param in keys(root).items():
        found.setdefault(key, []).append((root, param))
    for command in root.commands.values() if isinstance(root, click.Group) else ():
        for key, pairs in all_keys(command).items():
            found.setdefault(key, []).extend(pairs)
    return found


# ------------------------------------------------------------------------------------------------------------
# Settings in a command


def defaults(command: click.Command, parent: click.Context | None) -> dict[str, Any]:
    """Returns click's default_map of a command, before its arguments are parsed."""
    mine = keys(command)
    if not mine or (parent is not None and parent.resilient_parsing):
        return {}
    found = settings(all_keys(parent.find_root().command) if parent is not None else mine)
    values = {param.name: found[key] for key, param in mine.items() if key in found}
    if parent is not None:
        parent.meta[_IN_EFFECT] = {command.name: values}
    return {param.name: [found[key].value] if param.multiple else found[key].value  # type: ignore[attr-defined]
            for key, param in mine.items() if key in found}  # fmt: skip


def in_effect(context: click.Context | None = None) -> dict[str, Setting]:
    """Returns parameter -> setting, for the settings that the running command took."""
    context = context or click.get_current_context(silent=True)
    if context is None:
        return {}
    found = context.meta.get(_IN_EFFECT, {}).get(context.command.name, {})
    return {n: one for n, one in found.items() if context.get_parameter_source(n) is ParameterSource.DEFAULT_MAP}


def settle(context: click.Context) -> None:
    """Drops settings that options replace: the file's mmproj does not belong to another --model."""
    if keys(context.command):
        _warn_of_unknown(all_keys(context.find_root().command))
    typed = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    typed = {name for name in typed if context.params[name] not in (None, ())}
    replaced = {key for name in typed for key in _REPLACED.get(name, ())}
    if context.params.get("method") == "full":
        replaced.add("budget")
    if "keep" in typed and context.params["keep"] == "ram":
        replaced.add("keep-folder")
    for param in context.command.params:
        if param.name in in_effect(context) and param.opts[0].strip("-") in replaced:
            context.params[param.name] = () if getattr(param, "multiple", False) else None
            context.set_parameter_source(param.name, ParameterSource.DEFAULT)


def blamed(error: Exception, context: click.Context) -> Exception:
    """Adds the sources of settings to an error that names them, because the user did not type them."""
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    by_name = {str(param.name): param.opts[0].strip("-") for param in context.command.params}
    found = [(by_name[name], setting) for name, setting in in_effect(context).items()]
    told = [f"{key} = {one.value}, from {one.source}" for key, one in found if _speaks_of(text, key, str(one.value))]
    if not told:
        return error
    message = f"{text.rstrip('.')} ({'; '.join(told)})"
    if not isinstance(error, KvedgeError):
        return UsageError(message)
    error.args = (message,)
    return error


def _speaks_of(text: str, key: str, value: str) -> bool:
    if key not in ("model", "mmproj") and re.search(rf"\b{key.replace('-', '[-_]')}\b", text):
        return True
    return len(value) > 2 and not value.isdecimal() and value in text
