"""The plan that `kvedge tune` chose for a model is taken where nobody names another, and that is said."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pykvedge.cli import options
from pykvedge.errors import UsageError
from pykvedge.models import sandbox, tuned
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


def in_idle_time(given: Mapping[str, Any], model: Path, mmproj: Path | None) -> tuple[str, ...]:
    """Makes the arguments of `kvedge tune` for `kvedge serve --tune`; none without that, or where the model is tuned.

    Raises UsageError where no model can be tuned here.
    """
    if given["tune"] is None:
        return ()
    if importlib.util.find_spec("kvedge_lab") is None or not sandbox.can_start():
        raise UsageError("--tune needs `kvedge tune`, which cannot be started from this program")
    if mmproj is None:
        raise UsageError("--tune asks about pictures, so the model needs its image encoder: --mmproj FILE.gguf")
    if tuned.find(model) is not None:
        if not given["quiet"]:
            click.echo(f"kvedge: --tune does nothing: {model.name} is tuned (kvedge tune --show)", err=True)
        return ()
    named = {"model": model, "mmproj": mmproj, "minutes": given["tune"]}
    named |= {name: given[name] for name in ("threads", "gpu_layers", "device", "rpc", "kv_type", "kv_rotate")}
    return tuple(part for name, value in named.items() if value not in (None, "")
                 for part in (f"--{name.replace('_', '-')}", str(value)))  # fmt: skip
