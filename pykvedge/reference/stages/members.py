"""Finds the members of every stage: each module in stages/<stage>/ is one, so a new member is one new file.

What settings a member has is the library's to say (kvedge_stage_setting); the module has the formula.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import replace

from pykvedge.errors import UsageError, unknown
from pykvedge.native import calls
from pykvedge.reference.stages.base import Member, Param

STAGES = ("scorer", "allocator", "reducer", "decode", "pruner")


@functools.cache
def formulas(stage: str) -> dict[str, Member]:
    """Name -> member of one stage without its settings, in alphabetical order. Needs no library.

    Raises UnknownNameError for a stage that does not exist.
    """
    if stage not in STAGES:
        raise unknown("stage", stage, STAGES)
    package = importlib.import_module(f"pykvedge.reference.stages.{stage}")
    found: dict[str, Member] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        member = module.MEMBER
        if member.stage != stage or member.name.replace("-", "_") != info.name:
            raise UsageError(f"{module.__name__} must define the {stage} '{info.name}', not '{member.name}'")
        found[member.name] = member
    return dict(sorted(found.items()))


@functools.cache
def members(stage: str) -> dict[str, Member]:
    """Name -> member of one stage, in alphabetical order. Raises UnknownNameError, LibraryError."""
    return {
        name: replace(found, params=tuple(Param.declared(s) for s in calls.stage_settings(stage, name)))
        for name, found in formulas(stage).items()
    }
