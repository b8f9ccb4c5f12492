"""The table of the stages and presets that were registered in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pykvedge.errors import PluginError
from pykvedge.reference.stages.base import Member, Settings
from pykvedge.reference.stages.members import ALIASES, formulas

COMPRESSING = ("scorer", "allocator", "reducer")  # libkvedge calls these stages; each such plugin is a method by itself
STAGES = (*COMPRESSING, "pruner")  # stages that plugins can register
NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
DEFAULT_BUDGET = 0.2  # the budget of a method without one: the papers compare at this budget
SHOWN = 60  # length of an invalid name in a message, in characters


@dataclass(frozen=True)
class Plugin:
    """A registered member, with the data that the runtime needs to call it during a request.

    member: its function is the checked one (calling.py). origin: the file that registered it. queries, recent: last
    queries that a scorer sees, and last tokens that recent = auto protects. native: the kvedge_custom_* struct of a
    member from a shared library; None: a member in Python.
    """

    member: Member
    origin: str
    queries: Callable[[Settings], int] = lambda settings: 0
    recent: Callable[[Settings], int] = lambda settings: 0
    column_sums: bool = False
    native: Any = None
    pruned: Callable[..., Any] | None = None  # pruners: returns row numbers and rows (calling.checked_pruner)


@dataclass(frozen=True)
class Preset:
    """A method: its name, its source, and the fields of its plan that differ from the defaults of Plan.

    by_budget: ratio -> settings of stage members that replace those of `values` for budgets of that ratio or more.
    Larger ratios override smaller ratios.
    """

    name: str
    summary: str
    reference: str
    values: Mapping[str, Any] = field(default_factory=dict)
    by_budget: Mapping[float, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def budget(self) -> float:
        """The budget if the user gives none."""
        return self.values.get("budget", DEFAULT_BUDGET)


_reserved: set[str] = set()  # names of built-in methods
_members: dict[tuple[str, str], Plugin] = {}
_presets: dict[str, tuple[Preset, str]] = {}


def check_name(kind: str, name: Any, origin: str) -> None:
    """Raises PluginError for a name that is invalid on a command line, in a plan or in C."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= SHOWN else repr(name)[:SHOWN] + "..."
        raise PluginError(
            f"{origin}: the name of a {kind} must have 1 to 40 characters a-z, 0-9 or '-' and start with a letter, "
            f"not {shown}"
        )


def add(plugin: Plugin) -> None:
    """Registers a member. A file may register a name again. Raises PluginError for a name that is taken."""
    stage, name = plugin.member.stage, plugin.member.name
    check_name(stage, name, plugin.origin)
    before = _members.get((stage, name))
    if name in formulas(stage) or (stage == "reducer" and name in ALIASES):
        raise PluginError(f"{plugin.origin}: the name '{name}' belongs to a built-in {stage}; choose another name")
    if before is not None and before.origin != plugin.origin:
        raise PluginError(
            f"{plugin.origin}: {before.origin} has already registered a {stage} '{name}'; choose another name"
        )
    _members[stage, name] = plugin


def reserve(names: Iterable[str]) -> None:
    """Reserves the names of built-in methods; add_preset() then refuses them."""
    _reserved.update(names)


def add_preset(preset: Preset, origin: str) -> None:
    """Registers a method. A file may register a name again. Raises PluginError for a name that is taken."""
    check_name("preset", preset.name, origin)
    if preset.name in _reserved:
        raise PluginError(f"{origin}: the name '{preset.name}' belongs to a built-in method; choose another name")
    before = _presets.get(preset.name)
    if before is not None and before[1] != origin:
        raise PluginError(f"{origin}: {before[1]} has already registered a preset '{preset.name}'; choose another name")
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
    """Returns the current registrations, for restore()."""
    return dict(_members), dict(_presets)


def restore(state: tuple[dict[tuple[str, str], Plugin], dict[str, tuple[Preset, str]]]) -> None:
    """Resets the registrations to a snapshot, so a plugin that fails half-way leaves nothing behind."""
    _members.clear()
    _members.update(state[0])
    _presets.clear()
    _presets.update(state[1])
