"""Uses the plan that `kvedge tune` chose for a model, if the user names no plan, and prints a line about it."""

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
    """Returns the plan to use, and a line or "". A tuned plan replaces `plan` if the user chose at most a budget.

    Unless --quiet, a line on stderr names the tuned plan, or with `hint` says that the model is untuned. again: see
    tuned.plan_or_default. Raises ProfileError for a damaged certificate.
    """
    if given.get("stream") or given.get("profile") or options.chooses_plan({**given, "budget": None}):
        return plan, ""
    plan, line = tuned.plan_or_default(model, given["budget"], again)
    say = line
    if hint and not line and model.parent != DATA and model.is_file() and importlib.util.find_spec("kvedge_lab"):
        say = f"{model.name} is not tuned; `kvedge tune` finds the best plan for this model"
    if say and not given["quiet"]:
        click.echo(f"kvedge: {say}", err=True)
    return plan, line


def in_idle_time(given: Mapping[str, Any], model: Path, mmproj: Path | None) -> tuple[str, ...]:
    """Returns the arguments of `kvedge tune` for `kvedge serve --tune`; () without --tune or for a tuned model.

    Raises UsageError if no model can be tuned here.
    """
    if given["tune"] is None:
        return ()
    if importlib.util.find_spec("kvedge_lab") is None or not sandbox.can_start():
        raise UsageError("--tune cannot start `kvedge tune` from this program; omit --tune")
    if mmproj is None:
        raise UsageError("--tune needs the image encoder of the model: pass --mmproj FILE.gguf")
    if tuned.find(model) is not None:
        if not given["quiet"]:
            click.echo(f"kvedge: --tune has no effect: {model.name} is already tuned (kvedge tune --show)", err=True)
        return ()
    named = {"model": model, "mmproj": mmproj, "minutes": given["tune"]}
    named |= {name: given[name] for name in ("threads", "gpu_layers", "device", "rpc", "kv_type", "kv_rotate")}
    return tuple(part for name, value in named.items() if value not in (None, "")
                 for part in (f"--{name.replace('_', '-')}", str(value)))  # fmt: skip
