"""The members of every stage by their names: ours, those of plugins and, failing these, of installed packages."""

from __future__ import annotations

from typing import cast

from pykvedge.errors import unknown
from pykvedge.plans.plugins import installed, table
from pykvedge.plans.stages.base import Allocator, Member, Reducer, Scorer
from pykvedge.plans.stages.members import STAGES, members

__all__ = ["STAGES", "allocator", "member", "members", "reducer", "scorer"]


def scorer(name: str) -> Scorer:
    """The scorer of that name. Raises UnknownNameError."""
    return cast("Scorer", member("scorer", name))


def allocator(name: str) -> Allocator:
    """The allocator of that name. Raises UnknownNameError."""
    return cast("Allocator", member("allocator", name))


def reducer(name: str) -> Reducer:
    """The reducer of that name. Raises UnknownNameError."""
    return cast("Reducer", member("reducer", name))


def member(stage: str, name: str) -> Member:
    """The member of that name, built in or of a plugin. Raises UnknownNameError with a suggestion."""
    known = members(stage)
    if name in known:
        return known[name]
    plugin = installed.find(stage, name)
    if plugin is None:
        raise unknown(stage, str(name), [*known, *table.names(stage)], installed.problems())
    return plugin.member
