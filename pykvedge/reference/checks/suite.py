"""Runs every rule on many cases, for one method or stage: `kvedge methods --check`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykvedge.errors import BudgetError, KvedgeError, UsageError, unknown
from pykvedge.plans import making, presets, registry
from pykvedge.plans.amounts import Budget
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugins import installed
from pykvedge.reference.checks import rules
from pykvedge.reference.checks.prompts import LAYOUTS, Prompt, prompt
from pykvedge.reference.kvtypes import PLAIN
from pykvedge.reference.stages.base import Param

HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
LENGTHS = (1, 2, 3, 5, 17, 64, 129, 256, 600)
BUDGETS = (0.05, 0.1, 0.2, 0.5, 0.9, 1.0, 1, 16, 5000)
PROTECTION: tuple[dict[str, Any], ...] = (
    {"recent": 0}, {"recent": 7}, {"recent": 0.1}, {"recent": 0.05, "sinks": 4}, {"sinks": 400}, {"recent": 400},
    {"recent": 30, "sinks": 30},
)  # fmt: skip
CHECKED = ("scorer", "allocator", "reducer")  # decode policies act on what a model generates
BASE = "h2o"  # the method that a stage is tested in, if no method has the name of the stage
RANDOM_PROMPTS = 24


@dataclass(frozen=True)
class Case:
    """One test of a rule. title: its name in messages."""

    title: str
    run: Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """The outcome of one rule. status: passed, failed, nothing to try, or by design (the rule cannot hold)."""

    check: str
    cases: int
    failed: int
    status: str
    note: str = ""  # the first failure, or the reason


Make = Callable[..., Plan]


def check(name: str) -> list[Row]:
    """Runs every rule on the method or stage called `name`. Raises UnknownNameError, UsageError."""
    make = _maker(name)
    return [_try(title, list(cases)) for title, cases in _checks(make)] + [_commutes(make)]


def _maker(name: str) -> Make:
    """Returns make(budget, **settings) -> the method's plan, or the base method's plan with the stage `name`."""
    stages = [s for s in registry.STAGES if name in registry.members(s) or installed.find(s, name)]
    if name in presets.PRESETS or installed.find_preset(name):
        values: dict[str, Any] = {}
        method = name
    elif not stages:
        known = [*presets.methods(), *(m for stage in CHECKED for m in registry.members(stage))]
        raise unknown("method or stage", name, known, installed.problems())
    elif stages == ["pruner"]:
        raise UsageError(
            f"--check does not support pruners such as '{name}'; check a method, scorer, allocator or reducer"
        )
    elif stages == ["decode"]:
        raise UsageError(
            f"--check does not support decode policies such as '{name}'; check a method, scorer, allocator or reducer"
        )
    else:
        method, values = BASE, {stage: name for stage in stages if stage in CHECKED}

    def make(budget: Any = 0.2, **settings: Any) -> Plan:
        made = making.plan(method, **{**values, **settings})
        return made.with_(budget=Budget.parse(budget, "budget"))

    return make


def _checks(make: Make) -> Iterator[tuple[str, Iterator[Case]]]:
    yield "engines agree: prompt lengths, MHA, GQA, MQA", _lengths(make)
    yield "engines agree: budgets", _budgets(make)
    yield "engines agree: image layouts, text prior", _layouts(make)
    yield "engines agree: protected tokens", _protection(make)
    yield "engines agree: storage types, head sizes", _storage(make)
    yield "engines agree: settings", _settings(make)
    yield "engines agree: with every built-in stage", _compositions(make)
    yield "engines agree: equal and zero keys", _ties(make)
    yield "the budget is met exactly", _everywhere(make, rules.budget_is_met)
    yield "protected tokens are kept", _everywhere(make, rules.protected_are_kept)
    yield "budget 1.0 changes nothing", _everywhere(make, rules.everything_changes_nothing)
    yield "runs repeat, on any number of threads", _everywhere(make, rules.runs_repeat)


def _agree(title: str, plan: Plan, p: Prompt, kv_type: str = "f16") -> Case:
    return Case(title, lambda: rules.engines_agree(plan, p, kv_type, near_ties=True))


def _lengths(make: Make) -> Iterator[Case]:
    for (kind, heads), n in itertools.product(HEADS.items(), LENGTHS):
        yield _agree(f"{kind}, {n} tokens", make(), prompt(n, heads))


def _budgets(make: Make) -> Iterator[Case]:
    for budget, n in itertools.product(BUDGETS, (1, 12, 130)):
        try:
            plan = make(budget)
        except BudgetError:  # fewer pairs than the method protects: the refusal is correct
            continue
        yield _agree(f"budget {budget}, {n} tokens", plan, prompt(n))


def _layouts(make: Make) -> Iterator[Case]:
    for layout, prior, budget in itertools.product(LAYOUTS, (False, True), (0.1, 0.6)):
        for overflow in ("budget", "keep_all"):
            plan = make(budget, text_prior=prior, text_overflow=overflow)
            yield _agree(f"{layout}, text_prior {prior}, {overflow}, budget {budget}", plan, prompt(90, layout=layout))


def _protection(make: Make) -> Iterator[Case]:
    for settings, n in itertools.product(PROTECTION, (1, 9, 100)):
        yield _agree(f"{settings}, {n} tokens", make(0.3, **settings), prompt(n))


def _storage(make: Make) -> Iterator[Case]:
    for kv_type, size in itertools.product(PLAIN, (8, 40, 128)):
        yield _agree(f"{kv_type}, head size {size}", make(), prompt(77, size=size), kv_type)


def _settings(make: Make) -> Iterator[Case]:
    for stage in CHECKED:
        member = registry.member(stage, getattr(make(), stage))
        for param in member.params:
            for value in _values(param):
                plan = make(0.3, **{f"{stage}.{param.name}": value})
                yield _agree(f"{stage}.{param.name} = {value}", plan, prompt(120, layers=3))


def _values(param: Param) -> list[Any]:
    """Returns some values of a setting other than its default."""
    if param.choices:
        values: list[Any] = list(param.choices)
    elif isinstance(param.default, bool):
        values = [True, False]
    elif isinstance(param.default, float):
        values = [x for x in (param.low, param.high) if x is not None]
    elif isinstance(param.default, int):
        low = int(param.low if param.low is not None else param.default)
        values = [x for x in (low, low + param.step, low + 4 * param.step) if param.high is None or x <= param.high]
    else:
        values = []
    return [x for x in values if x != param.default]


def _compositions(make: Make) -> Iterator[Case]:
    for stage in CHECKED:
        for name in registry.members(stage):
            try:
                plan = make(0.3, **{stage: name})
            except UsageError:  # the critical rule cannot weigh these scores: the refusal is correct
                continue
            yield _agree(f"with {stage} {name}", plan, prompt(90, layers=3))


def _ties(make: Make) -> Iterator[Case]:
    p = prompt(48)
    p.k[:, :, 10:20] = p.k[:, :, 10:11]
    p.k[:, :, 20:24] = 0
    yield _agree("some keys alike or zero", make(0.5), p)
    zero = prompt(48)
    zero.k[:], zero.q[:] = 0, 0
    yield _agree("all keys zero", make(0.5), zero)


def _random_prompts() -> Iterator[tuple[str, Prompt, dict[str, Any]]]:
    """Yields a title, a prompt and settings of a plan; every run yields the same cases."""
    rng = np.random.default_rng(0)
    for i in range(RANDOM_PROMPTS):
        n, heads = int(rng.integers(1, 200)), list(HEADS.values())[i % 3]
        layout = LAYOUTS[i % len(LAYOUTS)]
        settings = {"budget": float(rng.uniform(0.05, 1.0)), "sinks": int(rng.integers(0, 5))}
        title = f"{n} tokens, {heads[0]}/{heads[1]} heads, {layout}, budget {settings['budget']:.3f}"
        yield title, prompt(n, heads, layers=3, layout=layout, seed=i), settings


def _everywhere(make: Make, rule: Callable[[Plan, Prompt, str], None]) -> Iterator[Case]:
    for (title, p, settings), engine in itertools.product(list(_random_prompts()), rules.ENGINES):
        plan = make(**settings)
        yield Case(f"{engine}, {title}", functools.partial(rule, plan, p, engine))


def _commutes(make: Make) -> Row:
    title, plan = "the order of heads does not matter", make()
    places = [s for s in CHECKED if registry.member(s, getattr(plan, s)).by_place]
    fixed = sorted({*places, *plan.profile_kinds()})  # a profile has numbers for each head
    if plan.projects:
        return Row(title, 0, 0, "by design", f"method '{plan.method}' uses each head's output projection")
    if fixed:
        which = " and ".join(f"{stage} '{getattr(plan, stage)}'" for stage in fixed)
        return Row(title, 0, 0, "by design", f"{which} depends on the number of the head")

    def rule(plan: Plan, p: Prompt, engine: str) -> None:
        rules.heads_commute(plan, p, engine, list(range(p.k.shape[1]))[::-1])

    return _try(title, list(_everywhere(make, rule)))


def _try(title: str, cases: list[Case]) -> Row:
    failed, note = 0, ""
    for case in cases:
        try:
            case.run()
        except KvedgeError as error:
            failed += 1
            note = note or f"{case.title}: {' '.join(str(error).split())}"
    status = "failed" if failed else "passed" if cases else "nothing to try"
    return Row(title, len(cases), failed, status, note)
