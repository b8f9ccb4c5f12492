"""Makes and checks the plans of named methods, for commands and the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pykvedge.errors import BudgetError, UnknownNameError, UsageError, unknown
from pykvedge.plans.amounts import Budget
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import DEFAULT_METHOD, DEFAULT_PRUNER, preset, preset_params
from pykvedge.plans.registry import STAGES


def plan(method: str, budget: Any = None, **settings: Any) -> Plan:
    """Makes the plan of a method, with some settings changed.

    budget: 0.2 (a ratio of the prompt) or 128 (KV pairs per layer and KV head). The default is 0.2, except 0.5 for
    "kvedge" (the default method) and for "mixkv", and 1.0 for "full".
    settings: fields of Plan (`reducer="averaged"`, `sinks=4`, `recent=32`), or settings of a stage member by their full
    name (`**{"scorer.window": 16}`).
    Raises UnknownNameError, BudgetError or UsageError.
    """
    chosen = preset(method)
    given = settings.pop("params", {})
    if not isinstance(given, Mapping):
        raise UsageError(f"params must map full names of settings, such as scorer.window, to values, not {given!r:.40}")
    preset_values = {k: v for k, v in chosen.values.items() if k != "params"}
    values = {"budget": chosen.budget, **preset_values, **{k: v for k, v in settings.items() if "." not in k}}
    if budget is not None:
        values["budget"] = budget
    values["budget"] = Budget.parse(values["budget"], "budget")
    params = {**preset_params(chosen, values["budget"], settings), **given}
    _check_names(settings)
    params.update({key: value for key, value in settings.items() if "." in key})
    if "image_tokens" in values and "pruner" not in values:
        values["pruner"] = DEFAULT_PRUNER
    return _checked(Plan(method=chosen.name, params=params, **values), settings)


def changed(given: Plan, budget: Any = None, **settings: Any) -> Plan:
    """Returns a plan with another budget and changed settings. Takes and raises the same as `plan`.

    If the member of a stage is replaced, the settings of the old member are dropped.
    """
    _check_names(settings)
    made = given if budget is None else given.with_(budget=budget)
    values = {key: value for key, value in settings.items() if "." not in key}
    if "image_tokens" in values and made.pruner == "none":
        values.setdefault("pruner", DEFAULT_PRUNER)
    gone = {stage for stage in STAGES if values.get(stage, getattr(made, stage)) != getattr(made, stage)}
    params = {key: value for key, value in made.params.items() if key.partition(".")[0] not in gone}
    params |= {key: value for key, value in settings.items() if "." in key}
    return _checked(made.with_(**values, params=params), settings)


def another(given: Plan, method: str, budget: Any = None, **settings: Any) -> Plan:
    """Makes the plan of a method as `plan` does. The result prunes images as the given plan does."""
    if given.pruner != "none":
        settings = {"pruner": given.pruner, "image_tokens": given.image_tokens, **settings}
    if settings.get("pruner", "none") == given.pruner:
        settings = {**{key: value for key, value in given.params.items() if key.startswith("pruner.")}, **settings}
    return plan(method, budget, **settings)


def _check_names(settings: Mapping[str, Any]) -> None:
    known = {f.name for f in fields(Plan)} - {"method", "params"}
    for key in settings:
        if "." not in key and key not in known:
            raise unknown("setting", key, known)


def _checked(made: Plan, settings: Mapping[str, Any]) -> Plan:
    """Raises BudgetError or UsageError for a setting without an effect. settings: what the caller asked for."""
    if made.method == "full" and made.budget.ratio != 1.0:
        raise BudgetError(
            f"method 'full' keeps all KV pairs, so a budget of {made.budget} has no meaning; "
            "choose another method, for example lookm"
        )
    of_images = ("pruner", "image_tokens")
    idle = [key for key in settings if key.partition(".")[0] not in of_images]
    if made.method == "full" and idle:
        raise UsageError(f"method 'full' keeps all KV pairs, so {idle[0]} has no meaning; choose another method")
    if settings.get("pruner", "none") != "none" and "image_tokens" not in settings and made.image_tokens.ratio == 1.0:
        raise UsageError("a pruner needs the number of tokens to read of an image; set image_tokens (--image-tokens)")
    if settings.get("critical_half", "budget") != "budget" and made.critical == "none":
        raise UsageError("critical_half needs critical; set critical to l1 or l2")
    return made


def default_plan(budget: Any = None, **settings: Any) -> Plan:
    """Makes the plan of the default method. The default budget is half of the prompt."""
    return plan(DEFAULT_METHOD, budget, **settings)


def checked_plan(given: Plan | None) -> Plan:
    """Returns `given`, or the default plan for None. Raises UsageError if `given` is no plan."""
    if given is None:
        return default_plan()
    if not isinstance(given, Plan):
        raise UsageError(f"the plan must be a pykvedge.Plan, for example pykvedge.plan('lookm'), not {given!r:.40}")
    return given


def check_protection(plan: Plan, n_tokens: int) -> None:
    """Raises BudgetError if protection that the user asked for does not fit into the budget of n_tokens tokens.

    Protection from a preset raises no error: it shrinks (Plan.protected).
    """
    try:
        usual = preset(plan.method).values.get("sinks", 0)
    except UnknownNameError:  # the plan comes from a file, and its method is unknown here
        usual = 0
    recent = plan.recent.count(n_tokens) if plan.recent else 0
    sinks = plan.sinks if plan.sinks != usual else 0
    kept = plan.count(n_tokens)
    if recent + sinks > kept and kept < n_tokens:
        raise BudgetError(
            f"a budget of {plan.budget} keeps {kept} of {n_tokens} tokens, fewer than the {recent + sinks} protected "
            f"tokens; raise --budget, or lower --recent and --sinks"
        )
