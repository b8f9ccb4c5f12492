"""Plans, budgets and presets: accepted and refused values, and conversion to and from JSON."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pykvedge
from pykvedge import BudgetError, Param, Plan, UnknownNameError, UsageError
from pykvedge.plans.amounts import Amount, Budget
from pykvedge.plans.making import changed
from pykvedge.plans.presets import PRESETS, preset
from pykvedge.plans.registry import STAGES, member


@pytest.mark.parametrize(("given_", "ratio", "pairs"), [
    (0.2, 0.2, None), ("0.2", 0.2, None), (1.0, 1.0, None), ("1.0", 1.0, None), ("1e-3", 0.001, None),
    (1, None, 1), ("1", None, 1), (128, None, 128), ("128", None, 128), (" 64 ", None, 64),
    (np.int64(128), None, 128), (np.uint8(1), None, 1),
    (np.float64(0.2), 0.2, None),
])  # fmt: skip
def test_a_number_with_a_point_is_a_ratio_one_without_counts_pairs(given_, ratio, pairs):
    assert Budget.parse(given_, "budget") == Budget(ratio, pairs)


@pytest.mark.parametrize("given_", [0, "0", -1, "-3", 0.0, "0.0", -0.5, "-0.5", 1.01, "1.5", 2.0, 2**31, "1e9"])
def test_budgets_out_of_range(given_):
    with pytest.raises(BudgetError, match="budget"):
        pykvedge.plan("lookm", given_)


@pytest.mark.parametrize("given_", ["", "x", "0.2x", "20%", "nan", "inf", "1e999", float("nan"), True, [1], (), {}])
def test_budgets_that_are_no_numbers(given_):
    with pytest.raises(UsageError, match="budget must be a ratio like"):
        pykvedge.plan("lookm", given_)


@pytest.mark.parametrize(("budget", "text"), [(0.2, "0.2"), (1e-5, "0.00001"), (1.0, "1.0"), (7, "7")])
def test_budgets_are_written_without_exponent(budget, text):
    assert str(Budget.parse(budget, "budget")) == text


@given(st.floats(min_value=1e-9, max_value=1.0), st.integers(min_value=0, max_value=10**7))
def test_a_ratio_keeps_at_least_one_and_at_most_all(ratio, n_tokens):
    n = Budget(ratio=ratio).count(n_tokens)
    assert n == 0 if n_tokens == 0 else 1 <= n <= n_tokens
    assert n <= max(1, n_tokens * ratio + 1e-6)


def test_presets_are_compositions_that_hold_together():
    assert pykvedge.methods()[:4] == ["full", "streaming-llm", "h2o", "lookm"]
    for name in pykvedge.methods():
        made = pykvedge.plan(name)
        assert made.method == name and made.budget.ratio == {"full": 1.0, "mixkv": 0.5, "kvedge": 0.5}.get(name, 0.2)
        assert preset(name).summary and preset(name).reference


@pytest.mark.parametrize(("budget", "settings"), [(None, {}), (0.2, {}), (64, {"sinks": 4, "scorer.window": 8})])
def test_naming_the_default_method_changes_nothing(budget, settings):
    named, unnamed = pykvedge.plan("kvedge", budget, **settings), pykvedge.default_plan(budget, **settings)
    assert named == unnamed and named.budget.value == (0.5 if budget is None else budget)


def test_the_four_methods_are_what_their_papers_say():
    lookm = pykvedge.plan("lookm")
    assert (lookm.scorer, lookm.reducer, lookm.text_prior, lookm.sinks) == ("cumulative", "pivotal", True, 0)
    h2o = pykvedge.plan("h2o")
    assert (h2o.scorer, h2o.reducer, h2o.text_prior, h2o.protected(100, 20)) == ("cumulative", "evict", False, (10, 0))
    streaming = pykvedge.plan("streaming-llm")
    assert (streaming.scorer, streaming.sinks, streaming.protected(100, 20)) == ("position", 4, (0, 4))


def test_settings_change_a_method():
    made = pykvedge.plan("lookm", 64, recent=8, sinks=4, text_prior=False, reducer="weighted", text_overflow="keep_all")
    assert made.recent == Amount(pairs=8) and made.sinks == 4 and not made.text_prior
    assert made.with_(sinks=2).sinks == 2
    assert made.method == "lookm"
    with pytest.raises(UsageError, match="plan of another method"):  # it would share only the name
        made.with_(method="h2o")
    with pytest.raises(UnknownNameError, match="did you mean 'budget'"):
        made.with_(bugdet=0.3)
    with pytest.raises(UnknownNameError, match="into params"):
        made.with_(**{"scorer.window": 8})


@pytest.mark.parametrize("settings", [{}, {"scorer.text": 5}, {"reducer.reach": 0.7}, {"reducer": "evict"}])
@pytest.mark.parametrize(("first", "then"), [
    (0.5, 0.1), (0.1, 0.5), (0.9, 0.5), (0.5, 128), (128, 0.75), (0.2, 0.1), (0.3, 0.5),
])  # fmt: skip
def test_a_plan_with_another_budget_is_the_one_that_is_made_with_it(first, then, settings):
    assert pykvedge.plan("kvedge", first, **settings).with_(budget=then) == pykvedge.plan("kvedge", then, **settings)


def test_a_plan_of_a_method_that_is_not_here_keeps_its_settings():
    made = Plan(method="not-installed", scorer="modal", budget=0.5, params={"scorer.text": 4})
    assert made.with_(budget=0.1).params == made.params


@pytest.mark.parametrize(("arguments", "settings", "hint"), [
    (("lokm",), {}, "did you mean 'lookm'"),
    (("nonsense-method-name",), {}, "known: adakv, calibrated, criticalkv, criticalkv-ada, elastic"),
    (("lookm",), {"reducer": "pivotl"}, "did you mean 'pivotal'"),
    (("lookm",), {"scorer": "attention"}, "unknown scorer 'attention'"),
    (("lookm",), {"buget": 0.2}, "did you mean 'budget'"),
    (("lookm",), {"reducer": "evict", "reducer.window": 16}, "reducer 'evict' has no setting 'window'"),
    (("lookm",), {"window.scorer": 16}, "unknown setting 'window.scorer'"),
    (("lookm",), {"text_overflow": "keepall"}, "did you mean 'keep_all'"),
])  # fmt: skip
def test_unknown_names_are_refused_with_a_suggestion(arguments, settings, hint):
    with pytest.raises(UnknownNameError, match=hint.replace("(", r"\(")):
        pykvedge.plan(*arguments, **settings)


@pytest.mark.parametrize(("budget", "settings"), [
    (10, {"recent": 8, "sinks": 4}), (10, {"recent": 11}), (10, {"sinks": 11}), (0.2, {"recent": 0.5}),
    (10, {"recent": 0.0, "sinks": 11}), (10, {"recent": 0.5, "sinks": 11}),
])  # fmt: skip
def test_a_budget_below_the_protected_tokens_is_refused(budget, settings):
    with pytest.raises(BudgetError, match="smaller than the protected"):
        pykvedge.plan("h2o", budget, **settings)


@pytest.mark.parametrize("settings", [
    {"sinks": -1}, {"sinks": 1.5}, {"sinks": True}, {"recent": -1}, {"recent": 1.5}, {"recent": "few"},
    {"text_prior": "yes"}, {"recent": -0.1}, {"params": 3}, {"params": "scorer.window"},
])  # fmt: skip
def test_settings_of_a_wrong_kind_are_refused(settings):
    with pytest.raises(UsageError):
        pykvedge.plan("h2o", 0.2, **settings)


def test_full_takes_no_budget():
    assert pykvedge.plan("full", 1.0) == pykvedge.plan("full")
    with pytest.raises(BudgetError, match="keeps all KV pairs"):
        pykvedge.plan("full", 0.5)


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        ("full", {"sinks": 4}, "so sinks has no meaning"),
        ("full", {"decode": "sliding"}, "so decode has no meaning"),
        ("snapkv", {"pruner": "grid"}, "set image_tokens"),
        ("snapkv", {"critical_half": "free"}, "set critical to l1 or l2"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(method, settings, says):
    for make in (lambda: pykvedge.plan(method, **settings), lambda: changed(pykvedge.plan(method), **settings)):
        with pytest.raises(UsageError, match=says):
            make()


def test_plans_do_not_change_and_can_be_compared():
    made = pykvedge.plan("lookm")
    with pytest.raises(AttributeError):
        made.sinks = 3
    with pytest.raises(TypeError):
        made.params["scorer.window"] = 3
    assert made == pykvedge.plan("lookm") and hash(made) == hash(pykvedge.plan("lookm"))
    assert made != pykvedge.plan("lookm", 0.3)


def test_plans_survive_json():
    plans = [pykvedge.plan(name) for name in pykvedge.methods()]
    plans += [pykvedge.plan("lookm", b, recent=r, sinks=1) for b in (0.3, 64) for r in (None, 0, 0.1, 16)]
    for made in plans:
        assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json('{"kvedge_plan": 1, "scorer": "cumulative", "budget": {"ratio": 1}}').budget.ratio == 1.0


@pytest.mark.parametrize(("text", "says"), [
    ("", "not a plan"), ("[]", "not a plan"), ("{}", "not a plan"), ('{"kvedge_plan": 2}', "does not have version 1"),
    ('{"kvedge_plan": 1, "scorrer": "position"}', "did you mean 'scorer'"),
    ('{"kvedge_plan": 1, "budget": {"share": 0.2}}', "must be"),
    ('{"kvedge_plan": 1, "budget": {"ratio": "a"}}', "number"),
    ('{"kvedge_plan": 1, "budget": {"pairs": 0}}', "at least 1"), ('{"kvedge_plan": 1, "sinks": "4"}', "sinks"),
    ('{"kvedge_plan": 1, "budget": {"ratio": 1%s}}' % ("0" * 400), "too large"),
    ('{"kvedge_plan": 1, "scorer": "window", "params": {"scorer.window": Infinity}}', "whole number"),
])  # fmt: skip
def test_json_that_is_no_plan_is_refused(text, says):
    with pytest.raises(UsageError, match=says):
        Plan.from_json(text)


def test_what_the_library_is_told():
    text = pykvedge.plan("lookm", 1e-4, recent=1e-5, sinks=2, text_overflow="keep_all").as_text()
    assert text == {"scorer": "cumulative", "allocator": "uniform", "reducer": "pivotal", "decode": "keep-all",
                    "pruner": "none", "budget": "0.0001", "image_tokens": "1.0", "recent": "0.00001", "sinks": "2",
                    "text_prior": "true", "text_overflow": "keep_all", "critical": "none",
                    "critical_half": "budget"}  # fmt: skip
    assert pykvedge.plan("h2o").as_text()["recent"] == "auto"


def test_settings_of_members_are_checked():
    window = Param("window", 32, "queries that look", low=1, high=512)
    assert window.check("16", "scorer.window") == 16
    for bad in ("many", 0, 513, 1.5, True, math.inf, -math.inf, math.nan):
        with pytest.raises(UsageError, match=r"scorer\.window"):
            window.check(bad, "scorer.window")
    weight = Param("weight", 0.5, "how much")
    for bad in (math.inf, "inf", math.nan, "nan", 10**400, True):
        with pytest.raises(UsageError, match=r"scorer\.weight must be a number"):
            weight.check(bad, "scorer.weight")
    pooling = Param("pooling", "avg", "how", choices=("avg", "max"))
    assert pooling.check("max", "scorer.pooling") == "max"
    with pytest.raises(UsageError, match="one of avg, max"):
        pooling.check("sum", "scorer.pooling")
    assert Param("normalise", True, "whether").check("off", "a.b") is False


def test_every_preset_names_members_that_exist():
    for entry in PRESETS.values():
        made = pykvedge.plan(entry.name)
        for stage in STAGES:
            assert json.dumps(made.settings(stage)) and member(stage, getattr(made, stage))
