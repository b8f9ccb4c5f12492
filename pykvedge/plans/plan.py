"""A Plan says what is kept of a prompt: five stages, a budget, and protected tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pykvedge.errors import BudgetError, UnknownNameError, UsageError, unknown
from pykvedge.plans import registry
from pykvedge.plans.amounts import LARGEST_COUNT, Amount, Budget, ImageTokens
from pykvedge.plans.presets import params_elsewhere
from pykvedge.plans.registry import STAGES, member
from pykvedge.reference.stages.members import ALIASES
from pykvedge.system import shown

JSON_VERSION = 1
TEXT_OVERFLOW = ("budget", "keep_all")
CRITICAL = ("none", "l1", "l2")
CRITICAL_HALF = ("budget", "free")
AUTO = "auto"  # value of `recent`: the scorer chooses the number (H2O, LOOK-M: half of the budget)


@dataclass(frozen=True, repr=False)
class Plan:
    """The fields of a plan in kvedge.h. `params` holds settings of stage members ("scorer.window").

    Raises UnknownNameError, BudgetError or UsageError if the fields do not fit together.
    """

    method: str = "full"
    scorer: str = "position"
    allocator: str = "uniform"
    reducer: str = "evict"
    decode: str = "keep-all"
    pruner: str = "none"
    image_tokens: ImageTokens = field(default=ImageTokens(ratio=1.0))
    budget: Budget = field(default=Budget(ratio=1.0))
    recent: Amount | None = None  # None: auto
    sinks: int = 0
    text_prior: bool = False
    text_overflow: str = "budget"
    critical: str = "none"  # norm of projected values in the critical rule (stages/critical.py)
    critical_half: str = "budget"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("method", *STAGES):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} must be a name, not {getattr(self, name)!r:.40}")
        if not isinstance(self.params, Mapping) or not all(isinstance(key, str) for key in self.params):
            raise UsageError(f"params must map names of settings to values, not {self.params!r:.40}")
        _set(self, "reducer", ALIASES.get(self.reducer, self.reducer))
        for stage in STAGES:
            member(stage, getattr(self, stage))
        _set(self, "budget", Budget.parse(self.budget, "budget"))
        _set(self, "image_tokens", ImageTokens.parse(self.image_tokens, "image_tokens"))
        if self.pruner == "none" and self.image_tokens.ratio != 1.0:
            raise UsageError(f"image_tokens {self.image_tokens} needs a pruner, for example residual")
        _set(self, "recent", _recent(self.recent))
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or not 0 <= self.sinks <= LARGEST_COUNT:
            raise UsageError(f"sinks must be a whole number of tokens, 0 or more, not {self.sinks!r}")
        if not isinstance(self.text_prior, bool):
            raise UsageError(f"text_prior must be true or false, not {self.text_prior!r}")
        if self.text_overflow not in TEXT_OVERFLOW:
            raise unknown("text_overflow", str(self.text_overflow), TEXT_OVERFLOW)
        for name, choices in (("critical", CRITICAL), ("critical_half", CRITICAL_HALF)):
            if getattr(self, name) not in choices:
                raise unknown(name, str(getattr(self, name)), choices)
        _set(self, "params", MappingProxyType(_check_params(self)))
        _check_protection(self)
        _check_critical(self)

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        pruner = f", pruner {self.pruner} {self.image_tokens}" if self.pruner != "none" else ""
        stages = f"{self.scorer}, {self.allocator}, {self.reducer}, {self.decode}{pruner}"
        given = "".join(f", {key}={value!r}" for key, value in self.params.items())
        return f"<Plan {self.method} {self.budget}: {stages}{given}>"

    def _repr_html_(self) -> str:
        return shown.table(f"Plan {self.method}", self.as_text())

    def __reduce__(self) -> tuple[Callable[[str], Plan], tuple[str]]:
        return Plan.from_json, (self.to_json(),)

    def count(self, n_tokens: int) -> int:
        """Returns the KV pairs per layer and KV head that an even share of the budget keeps of n_tokens.

        A short prompt stays whole if the scorer needs all of it (SnapKV: no longer than the window).
        """
        whole = n_tokens <= registry.scorer(self.scorer).whole_up_to(self.settings("scorer"))
        return n_tokens if whole else self.budget.count(n_tokens)

    def asked_recent(self, n_tokens: int, kept: int) -> int:
        """Returns the number of last tokens that the plan protects in a head with `kept` pairs; can exceed `kept`."""
        if self.recent is not None:
            return min(n_tokens, self.recent.count(n_tokens))
        return registry.scorer(self.scorer).auto_recent(kept, self.count(n_tokens), self.settings("scorer"))

    def protected(self, n_tokens: int, kept: int) -> tuple[int, int]:
        """Returns the protected last and first tokens, (recent, sinks), of a head that keeps `kept` of n_tokens.

        If `kept` is too small for both, the scorer says which of the two shrinks first.
        """
        scorer, recent = registry.scorer(self.scorer), self.asked_recent(n_tokens, kept)
        if scorer.sinks_first:
            sinks = min(self.sinks, kept)
            return min(recent, kept - sinks), sinks
        recent = min(recent, kept)
        return recent, min(self.sinks, kept - recent)

    def settings(self, stage: str) -> dict[str, Any]:
        """Returns the settings of the member chosen for `stage`, with defaults, by their short names."""
        chosen = member(stage, getattr(self, stage))
        return {p.name: self.params.get(f"{stage}.{p.name}", p.default) for p in chosen.params}

    @property
    def drops(self) -> bool:
        """Whether the decode policy drops rows while an answer is generated."""
        return self.decode != "keep-all" and self.budget.ratio != 1.0

    @property
    def projects(self) -> bool:
        """Whether the scorer or the critical rule needs the layers' output projections."""
        return self.critical != "none" or registry.scorer(self.scorer).projects(self.settings("scorer"))

    def profile_kinds(self) -> dict[str, str]:
        """Returns stage -> kind of calibrated profile (profile.py), for the stages that need a profile.

        A plan holds no profile and no path of one, so a plan means the same on every machine and model.
        """
        scorer, allocator = registry.scorer(self.scorer), registry.allocator(self.allocator)
        kinds = {
            "scorer": scorer.profile(self.settings("scorer")),
            "allocator": allocator.profile(self.settings("allocator")),
        }
        return {stage: kind for stage, kind in kinds.items() if kind}

    def does_without(self, stage: str) -> bool:
        """Returns whether a stage in profile_kinds() works without a profile, for a model that has none."""
        return stage == "allocator" and registry.allocator(self.allocator).does_without(self.settings("allocator"))

    def as_text(self) -> dict[str, str]:
        """Returns the fields as text for kvedge_plan_set, in an order that it accepts."""
        out = {stage: getattr(self, stage) for stage in STAGES}
        out["image_tokens"] = str(self.image_tokens)
        out["budget"] = str(self.budget)
        out["recent"] = AUTO if self.recent is None else str(self.recent)
        out["sinks"] = str(self.sinks)
        out["text_prior"] = "true" if self.text_prior else "false"
        out["text_overflow"] = self.text_overflow
        out["critical"], out["critical_half"] = self.critical, self.critical_half
        for key, value in self.params.items():
            out[key] = str(value).lower() if isinstance(value, bool) else str(value)
        return out

    def to_json(self) -> str:
        """Returns one JSON object. from_json reads it back to an equal plan."""
        return self._json

    @cached_property
    def _json(self) -> str:
        out: dict[str, Any] = {"kvedge_plan": JSON_VERSION}
        for f in fields(self):
            value = getattr(self, f.name)
            out[f.name] = value.as_json() if isinstance(value, Amount) else value
        out["recent"] = AUTO if self.recent is None else out["recent"]
        out["params"] = dict(self.params)
        return json.dumps(out)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads a plan from JSON. Raises UsageError if the text is no plan, or a plan of another version."""
        if not isinstance(text, str):
            raise UsageError(f"a plan must be read from text, not from {text!r:.40}")
        try:
            data = json.loads(text)
        except ValueError as error:
            raise UsageError(f"not a plan: {error}") from None
        except RecursionError:
            raise UsageError("not a plan: the JSON is nested too deeply") from None
        if not isinstance(data, dict) or "kvedge_plan" not in data:
            raise UsageError('not a plan: a JSON object with "kvedge_plan": 1 was expected')
        if data.pop("kvedge_plan") != JSON_VERSION:
            raise UsageError(f"this plan does not have version {JSON_VERSION}; update kvedge to read the plan")
        known = {f.name for f in fields(cls)}
        for name in data:
            if name not in known:
                raise unknown("plan field", name, known)
        for name in ("budget", "recent", "image_tokens"):
            if isinstance(data.get(name), dict):
                data[name] = _amount_from_json(name, data[name])
        return cls(**data)

    def with_(self, **changes: Any) -> Plan:
        """Returns a copy with some fields replaced. A new budget also sets the method's settings for that budget.

        `method` cannot change. Raises UnknownNameError, BudgetError or UsageError.
        """
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise unknown("plan field", name, known, ["put settings of stages into params"] if "." in name else [])
        if changes.get("method", self.method) != self.method:
            raise UsageError("with_ cannot change the method; use pykvedge.plan to make a plan of another method")
        if "budget" in changes and "params" not in changes:
            budget = Budget.parse(changes["budget"], "budget")
            members = {stage: getattr(self, stage) for stage in STAGES}
            params = params_elsewhere(self.method, members, self.params, self.budget, budget)
            changes = {**changes, "budget": budget, "params": params}
        return replace(self, **changes)


def _set(plan: Plan, name: str, value: Any) -> None:
    object.__setattr__(plan, name, value)


def _amount_from_json(name: str, data: dict[str, Any]) -> Amount:
    if len(data) != 1 or not set(data) <= {"ratio", "pairs"}:
        raise UsageError(f'{name} in a plan must be {{"ratio": 0.2}} or {{"pairs": 128}}, not {json.dumps(data)}')
    [(unit, value)] = data.items()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name}.{unit} in a plan must be a number, not {json.dumps(value)}")
    if unit == "ratio" and abs(value) > sys.float_info.max:
        raise UsageError(f"{name}.ratio in a plan is too large")
    return Amount.parse(float(value) if unit == "ratio" else value, name)


def _recent(value: Any) -> Amount | None:
    if value is None or value == AUTO:
        return None
    amount = Amount.parse(value, "recent")
    in_range = (amount.pairs or 0) in range(LARGEST_COUNT + 1) and 0 <= (amount.ratio or 0) <= 1
    if not in_range:
        raise UsageError(f"recent must be 'auto', 0 or more tokens, or a ratio between 0.0 and 1.0, not {amount}")
    return amount


def _check_params(plan: Plan) -> dict[str, Any]:
    known = {f"{stage}.{p.name}": p for stage in STAGES for p in member(stage, getattr(plan, stage)).params}
    for key in plan.params:
        stage, _, name = key.partition(".")
        if key not in known and stage in STAGES and not member(stage, getattr(plan, stage)).params:
            raise UnknownNameError(
                f"{stage} '{getattr(plan, stage)}' has no setting '{name}'; this {stage} has no settings"
            )
        if key not in known:
            raise unknown("setting", key, known)
    return {key: known[key].check(value, key) for key, value in plan.params.items()}


def _check_protection(plan: Plan) -> None:
    """Raises BudgetError for protection that fits no prompt length. Other protection shrinks (Plan.protected)."""
    budget, recent = plan.budget, plan.recent or Amount(pairs=0)
    least = recent.count(0)  # the number that is protected in a prompt of any length
    if budget.pairs is not None and least + plan.sinks > budget.pairs:
        raise BudgetError(
            f"a budget of {budget.pairs} KV pairs is smaller than the protected tokens "
            f"({least} recent, {plan.sinks} sinks); raise the budget, or protect fewer tokens"
        )
    if budget.ratio is not None and recent.ratio is not None and recent.ratio > budget.ratio:
        raise BudgetError(
            f"a budget of {budget} of the prompt is smaller than the protected share of recent tokens, {recent}; "
            "raise the budget, or protect fewer tokens"
        )


def _check_critical(plan: Plan) -> None:
    """Raises UsageError if the critical rule cannot weigh the scorer's scores."""
    scorer = registry.scorer(plan.scorer)
    if plan.critical == "none" or scorer.attends(plan.settings("scorer")):
        return
    scorers = (registry.scorer(name) for name in registry.members("scorer"))
    attending = ", ".join(s.name for s in scorers if s.attends({p.name: p.default for p in s.params}))
    raise UsageError(
        f"critical {plan.critical} works only with a scorer that scores by attention alone, not with scorer "
        f"'{plan.scorer}'; use scorer {attending}, expected with scorer.vnorm=false, or critical none"
    )
