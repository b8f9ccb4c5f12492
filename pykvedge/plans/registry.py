"""Finds stage members by name: built in, registered by plugins, then from installed packages."""

from __future__ import annotations

from typing import cast

from pykvedge.errors import unknown
from pykvedge.plans.plugins import installed, table
from pykvedge.reference.stages.base import Allocator, Member, Reducer, Scorer
from pykvedge.reference.stages.members import STAGES, members

__all__ = ["STAGES", "allocator", "member", "members", "reducer", "scorer"]


def scorer(name: str) -> Scorer:
    """Returns the scorer called `name`. Raises UnknownNameError."""
    return cast("Scorer", member("scorer", name))


def allocator(name: str) -> Allocator:
    """Returns the allocator called `name`. Raises UnknownNameError."""
    return cast("Allocator", member("allocator", name))


def reducer(name: str) -> Reducer:
    """Returns the reducer called `name`. Raises UnknownNameError."""
    return cast("Reducer", member("reducer", name))


def member(stage: str, name: str) -> Member:
    """Returns the member of a stage, built in or from a plugin. Raises UnknownNameError with a suggestion."""
    known = members(stage)
    if name in known:
        return known[name]
    plugin = installed.find(stage, name)
    if plugin is None:
        raise unknown(stage, str(name), [*known, *table.names(stage)], installed.problems())
    return plugin.member
