"""This table has the stages and presets that were registered in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pykvedge.errors import PluginError
from pykvedge.reference.stages.base import Member, Settings
from pykvedge.reference.stages.members import ALIASES, formulas

COMPRESSING = ("scorer", "allocator", "reducer")  # one of these alone is a method, and libkvedge calls it
STAGES = (*COMPRESSING, "pruner")  # those that can be registered
NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
DEFAULT_BUDGET = 0.2  # of a method that says nothing else: the setting that the papers compare at
SHOWN = 60  # characters of a wrong name in a message


@dataclass(frozen=True)
class Plugin:
    """This is a registered member, and what the runtime must know to call it in the middle of a request.

    member: its function is the checked one (calling.py). origin: the file that registered it. queries, recent: last
    queries that a scorer sees, and last tokens that recent = auto protects. native: the kvedge_custom_* struct of a
    member that a shared library brought; None for one in Python.
    """

    member: Member
    origin: str
    queries: Callable[[Settings], int] = lambda settings: 0
    recent: Callable[[Settings], int] = lambda settings: 0
    column_sums: bool = False
    native: Any = None
    pruned: Callable[..., Any] | None = None  # of a pruner: numbers and rows (calling.checked_pruner)


@dataclass(frozen=True)
class Preset:
    """A preset is a method: what it is, where it is from, and the fields of its plan that differ from Plan's.

    by_budget: settings of stage members that take the place of those of `values` where that ratio of the prompt or more
    is kept; of a larger ratio they come after those of a smaller one.
    """

    name: str
    summary: str
    reference: str
    values: Mapping[str, Any] = field(default_factory=dict)
    by_budget: Mapping[float, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def budget(self) -> float:
        """This is the budget if none is asked for."""
        return self.values.get("budget", DEFAULT_BUDGET)


_reserved: set[str] = set()  # names of built-in methods
_members: dict[tuple[str, str], Plugin] = {}
_presets: dict[str, tuple[Preset, str]] = {}


def check_name(kind: str, name: Any, origin: str) -> None:
    """Refuses a name that cannot be written on a command line, in a plan or in C."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= SHOWN else repr(name)[:SHOWN] + "..."
        raise PluginError(
            f"{origin}: a {kind}'s name is 1 to 40 of a-z, 0-9 and '-' and starts with a letter, not {shown}"
        )


def add(plugin: Plugin) -> None:
    """Registers a member; the same file may do so again. Raises PluginError for a name that is taken."""
    stage, name = plugin.member.stage, plugin.member.name
    check_name(stage, name, plugin.origin)
    before = _members.get((stage, name))
    if name in formulas(stage) or (stage == "reducer" and name in ALIASES):
        raise PluginError(f"{plugin.origin}: there is a built-in {stage} '{name}'; choose another name")
    if before is not None and before.origin != plugin.origin:
        raise PluginError(f"{plugin.origin}: {before.origin} registered a {stage} '{name}' already")
    _members[stage, name] = plugin


def reserve(names: Iterable[str]) -> None:
    """Keeps the names of built-in methods from being registered."""
    _reserved.update(names)


def add_preset(preset: Preset, origin: str) -> None:
    """Registers a method name; the same file may do so again. Raises PluginError for a name that is taken."""
    check_name("preset", preset.name, origin)
    if preset.name in _reserved:
        raise PluginError(f"{origin}: there is a built-in method '{preset.name}'; choose another name")
    before = _presets.get(preset.name)
    if before is not None and before[1] != origin:
        raise PluginError(f"{origin}: {before[1]} registered a preset '{preset.name}' already")
    _presets[preset.name] = (preset, origin)


def get(stage: str, name: str) -> Plugin | None:
    return _members.get((stage, name))


def get_preset(name: str) -> Preset | None:
    return _presets[name][0] if name in _presets else None


def names(stage: str) -> list[str]:
    return [name for of, name in _members if of == stage]


def preset_names() -> list[str]:
    return list(_presets)


def snapshot() -> tuple[dict[tuple[str, str], Plugin], dict[str, tuple[Preset, str]]]:
    """Returns what is registered now, for restore."""
    return dict(_members), dict(_presets)


def restore(state: tuple[dict[tuple[str, str], Plugin], dict[str, tuple[Preset, str]]]) -> None:
    """Forgets what was registered since the snapshot: a plugin that fails half-way leaves nothing behind."""
    _members.clear()
    _members.update(state[0])
    _presets.clear()
    _presets.update(state[1])
