"""The plan that `kvedge tune` chose for a model is taken where nobody names another, and that is said."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pykvedge.cli import options
from pykvedge.models import tuned
from pykvedge.plans.plan import Plan
from pykvedge.system.files import DATA


def taken(given: Mapping[str, Any], plan: Plan, model: Path, again: bool = True, hint: bool = True) -> tuple[Plan, str]:
    """Returns the tuned plan where at most a budget says what to keep, else `plan`; and a line where it is tuned.

    Says on stderr, unless --quiet, which plan a model was tuned to, or with `hint` that it was not. again: as of
    tuned.unnamed.
    Raises ProfileError for a damaged certificate.
    """
    if given.get("stream") or given.get("profile") or options.chooses_plan({**given, "budget": None}):
        return plan, ""
    plan, line = tuned.unnamed(model, given["budget"], again)
    say = line
    if hint and not line and model.parent != DATA and model.is_file() and importlib.util.find_spec("kvedge_lab"):
        say = f"{model.name} is untuned; `kvedge tune` measures which plan fits it"
    if say and not given["quiet"]:
        click.echo(f"kvedge: {say}", err=True)
    return plan, line
