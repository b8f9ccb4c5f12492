"""Finds the members of every stage. Each module in stages/<stage>/ is one member; a new member is one new file.

The module holds the formula of a member. The library lists the member's settings (kvedge_stage_setting) and the facts
that depend on them (kvedge_stage_get_facts).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import replace
from typing import Any

from pykvedge.errors import unknown
from pykvedge.native import calls
from pykvedge.native.abi import Facts
from pykvedge.reference.stages import base
from pykvedge.reference.stages.base import Allocator, Member, Param, Reducer, Scorer, Settings

_KINDS: dict[str, Any] = {"scorer": Scorer, "allocator": Allocator, "reducer": Reducer}
_KINDS |= {"decode": base.DecodePolicy, "pruner": base.Pruner}
_FORMULAS = ("score", "reserve", "attention", "variation", "allocate", "reduce", "evict", "prune")
STAGES = tuple(_KINDS)
ALIASES = {"feature": "averaged"}  # PrefixKV (table 12) calls LOOK-M's averaged merge `feature`


@functools.cache
def formulas(stage: str) -> dict[str, Member]:
    """Returns name -> member of one stage, in alphabetical order, without settings. Needs no library.

    Raises UnknownNameError for an unknown stage.
    """
    if stage not in STAGES:
        raise unknown("stage", stage, STAGES)
    package = importlib.import_module(f"pykvedge.reference.stages.{stage}")
    found: dict[str, Member] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module, name = importlib.import_module(f"{package.__name__}.{info.name}"), info.name.replace("_", "-")
        has = {formula: getattr(module, formula) for formula in _FORMULAS if hasattr(module, formula)}
        has["by_place"] = getattr(module, "BY_PLACE", False)
        found[name] = _KINDS[stage](name, module.SUMMARY, module.SOURCE, **has)
    return dict(sorted(found.items()))


@functools.cache
def members(stage: str) -> dict[str, Member]:
    """Returns name -> member of one stage, in alphabetical order. Raises UnknownNameError, LibraryError."""
    return {name: _known(found) for name, found in formulas(stage).items()}


def _known(member: Member) -> Member:
    """Returns the member with the data of the library: settings, and facts that depend on settings."""
    params = tuple(Param.declared(s) for s in calls.stage_settings(member.stage, member.name))

    def facts(settings: Settings, kept: int = 0, even: int = 0) -> Facts:
        numbers = [p.number(settings.get(p.name, p.default)) for p in params]
        return calls.stage_facts(member.stage, member.name, numbers, kept, even)

    if isinstance(member, Scorer):
        return replace(
            member,
            params=params,
            auto_recent=lambda kept, even, settings: facts(settings, kept, even).recent,
            whole_up_to=lambda settings: facts(settings).whole_up_to,
            sinks_first=facts({}).sinks_first,
            reserved=lambda kept, settings: facts(settings, kept).reserved,
            profile=lambda settings: _text(facts(settings).profile),
            attends=lambda settings: facts(settings).attends,
            projects=lambda settings: facts(settings).projects,
        )
    if isinstance(member, Allocator):
        return replace(
            member,
            params=params,
            profile=lambda settings: _text(facts(settings).profile),
            does_without=lambda settings: facts(settings).does_without,
        )
    if isinstance(member, Reducer):
        return replace(member, params=params, queries=facts({}).queries)
    return replace(member, params=params)


def _text(name: bytes | None) -> str | None:
    return name.decode() if name else None
