"""Scorers and allocators beyond H2O and LOOK-M: other scores, and budgets that differ between layers and heads."""

import itertools

import numpy as np
import pytest
from arrays import profiles_of, prompt
from choosing import crossed, whole
from test_parity import assert_same

import pykvedge
from pykvedge.errors import UnknownNameError, UsageError
from pykvedge.plans.registry import STAGES, members
from pykvedge.reference.stages.shares import round_shares

ALLOCATORS, SCORERS = list(members("allocator")), list(members("scorer"))
SETTINGS = {
    "scorer": [
        {"scorer": "window", "scorer.window": 8, "scorer.kernel": 1},
        {"scorer": "window", "scorer.window": 16, "scorer.pool": "max", "scorer.kernel": 7},
        {"scorer": "window", "scorer.gqa": "max"},
        {"scorer": "window", "recent": 0},
        {"scorer": "cumulative", "scorer.window": 5},
        {"scorer": "cumulative", "scorer.share": "layer"},
        {"scorer": "random", "scorer.seed": 7},
        {"scorer": "mixkv", "scorer.window": 8, "scorer.kernel": 1},
        {"scorer": "mixkv", "scorer.window": 16, "scorer.pool": "max", "scorer.kernel": 7},
        {"scorer": "mixkv", "scorer.window": 24, "scorer.parts": 3},
        {"scorer": "mixkv", "scorer.window": 24, "scorer.parts": 1, "allocator": "ada"},
        {"scorer": "mixkv", "scorer.window": 4, "scorer.value": "knorm"},
        {"scorer": "mixkv", "scorer.window": 4, "scorer.mode": "importance"},
        {"scorer": "mixkv", "scorer.window": 4, "scorer.mode": "diversity"},
        {"scorer": "mixkv", "scorer.window": 4, "scorer.mode": "even", "scorer.scale": "ex"},
        {"scorer": "mixkv", "scorer.window": 4, "scorer.scale": "ex"},
        {"scorer": "mixkv", "scorer.window": 4, "scorer.source": "profile"},
        {"scorer": "mixkv", "scorer.window": 4, "scorer.source": "profile", "scorer.mode": "even"},
        {"scorer": "mixkv", "scorer.source": "profile", "allocator": "heads"},
        {"scorer": "modal", "scorer.window": 8, "scorer.kernel": 1},
        {"scorer": "modal", "scorer.fade": 0.0, "scorer.parts": 2, "allocator": "ada"},
        {"scorer": "modal", "scorer.window": 64, "scorer.fade": 2.0, "scorer.parts": 8, "recent": 0},
        {"scorer": "modal", "scorer.outlier": 0.0, "scorer.text": 3},
        {"scorer": "modal", "scorer.outlier": 4.0, "scorer.gamma": 0.5},
        {"scorer": "mean", "scorer.spread": 0.0},
        {"scorer": "mean", "scorer.spread": 0.8, "sinks": 2},
        {"scorer": "mean", "scorer.spread": 1.0, "text_prior": True},
        {"scorer": "keydiff", "scorer.anchor": "mean"},
        {"scorer": "keydiff", "recent": 0},
        {"scorer": "expected", "scorer.n_future": 1, "scorer.eps": 0.02},
        {"scorer": "expected", "scorer.n_sink": 0, "scorer.covariance": False},
        {"scorer": "expected", "scorer.n_sink": 9, "scorer.vnorm": False, "recent": 0},
        {"scorer": "replay", "scorer.source": "repeat", "scorer.chunk": 16},
        {"scorer": "replay", "scorer.source": "instruction", "scorer.scope": "context"},
        {"scorer": "replay", "scorer.projected": True, "sinks": 2},
        {"scorer": "dct", "scorer.gamma": 0.0},
        {"scorer": "dct", "scorer.gamma": 0.5, "scorer.share": "head"},
        {"scorer": "dct", "scorer.gamma": 1.0},
    ],
    "allocator": [
        {"allocator": "pyramid", "allocator.beta": 1},
        {"allocator": "pyramid", "allocator.beta": 3},
        {"allocator": "pyramid", "allocator.rounding": "official"},
        {"allocator": "ada", "allocator.rounding": "official", "allocator.floor": 0.3},
        {"allocator": "ada", "allocator.budget_score": "mix", "scorer": "mixkv"},
        {"allocator": "ada", "allocator.budget_score": "attention", "scorer": "mixkv"},
        {"allocator": "entropy", "allocator.attention": "cross", "recent": 9},
        {"allocator": "entropy", "allocator.attention": "full"},
        {"allocator": "ada", "allocator.normalize": False},
        {"allocator": "ada", "allocator.floor": 0.0},
        {"allocator": "ada", "allocator.floor": 1.0},
        {"allocator": "global"},
        {"allocator": "global", "allocator.floor": 0.0, "scorer": "window"},
        {"allocator": "global", "allocator.floor": 1.0},
        {"allocator": "spectral", "allocator.gamma": 0.0},
        {"allocator": "spectral", "allocator.gamma": 0.5, "recent": 0},
        {"allocator": "spectral", "allocator.gamma": 1.0},
        {"allocator": "prefix", "allocator.source": "profile"},
        {"allocator": "prefix", "allocator.source": "profile", "scorer": "cumulative", "recent": 3},
        {"allocator": "calibrated", "allocator.share_of": "prompt", "recent": 3},
        {"allocator": "calibrated", "allocator.unmeasured": "ada", "recent": 3},
        {"allocator": "calibrated", "allocator.measured": 0.1},
        {"allocator": "heads", "allocator.rule": "headkv"},
        {"allocator": "heads", "allocator.rule": "headkv", "allocator.beta": 1.0},
        {"allocator": "heads", "allocator.rule": "headkv", "allocator.beta": 40.0, "recent": 0},
        {"allocator": "heads", "allocator.ratio": 0.0, "scorer": "cumulative"},
        {"allocator": "heads", "allocator.ratio": 1.0},
        {"allocator": "heads", "allocator.power": 0.0},
        {"allocator": "heads", "allocator.power": 2.5},
        {"allocator": "heads", "allocator.rounding": "official"},
        {"allocator": "heads", "allocator.rounding": "official", "allocator.rule": "headkv"},
    ],
    "reducer": [
        {"reducer": "weighted", "reducer.sim_filter": True},
        {"reducer": "weighted", "reducer.clamp": True},
        {"reducer": "weighted", "reducer.sim_filter": True, "reducer.clamp": True, "scorer": "cumulative"},
        {"reducer": "bucket", "reducer.into_protected": True},
        {"reducer": "bucket", "reducer.into_protected": True, "scorer": "cumulative", "sinks": 2},
        {"reducer": "bucket", "reducer.into_protected": False, "scorer": "cumulative", "sinks": 2},
        *({"reducer": name, "reducer.bias": "mass"} for name in ("averaged", "pivotal", "position")),
        {"reducer": "nearest", "reducer.reach": 0.5},
        {"reducer": "nearest", "reducer.reach": 2.0, "reducer.bias": "none"},
        {"reducer": "weighted", "reducer.bias": "mass", "reducer.clamp": True},
        {"reducer": "bucket", "reducer.bias": "mass", "reducer.into_protected": True},
        {"reducer": "match", "reducer.bias": "head", "reducer.queries": 2},
        {"reducer": "match", "reducer.mass": "absolute", "reducer.ridge": 0.1, "scorer": "cumulative"},
    ],
}


def numpy_result(plan, p):
    return pykvedge.compress(plan, *p.arguments, engine="numpy", profile=profiles_of(plan, p))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), *whole(((4, 1),))])
@pytest.mark.parametrize(("scorer", "allocator"), crossed(SCORERS, ALLOCATORS, ["ada"], ["window", "cumulative"]))
def test_every_allocator_with_every_scorer(native, scorer, allocator, heads):
    two = () if scorer == "keydiff" else (2,)  # two keys are equally far from their mean: rounding decides
    cases = [(120, 40)]
    if heads == (4, 2):
        cases += [(33, 0.2)]
        cases += [*itertools.product((1, *two, 33), (0.05, 0.7)), (120, 0.2), (600, 0.2)]
    for n_tokens, budget in cases:
        plan = pykvedge.plan("h2o", budget, scorer=scorer, allocator=allocator)
        result = assert_same(plan, prompt(n_tokens, heads, layers=3))
        kept = sum(len(head) for layer in result.kept for head in layer)
        assert kept == plan.count(n_tokens) * 3 * heads[1]  # exactly the budget


@pytest.mark.parametrize("settings", list(itertools.chain.from_iterable(SETTINGS.values())), ids=str)
def test_every_setting(native, settings):
    for n_tokens in (20, 150):
        assert_same(pykvedge.plan("h2o", 0.3, **{"scorer": "window", **settings}), prompt(n_tokens, layers=3))


def test_every_numeric_and_named_setting_is_tried():
    """A setting without a case above would be tested only with its default."""
    tried = {(case[stage], key) for stage, cases in SETTINGS.items() for case in cases for key in case if "." in key}
    stages = [stage for stage in STAGES if stage not in ("decode", "pruner")]  # decode and pruner: tested elsewhere
    settings = {(name, f"{stage}.{p.name}") for stage in stages for name, m in members(stage).items() for p in m.params}
    assert tried == settings


@pytest.mark.parametrize("name", pykvedge.methods())
def test_every_method_on_both_engines(native, name):
    for n_tokens in (5, 40, 300):
        assert_same(pykvedge.plan(name), prompt(n_tokens, layers=4))


def test_the_window_keeps_itself_and_what_it_looks_at():
    p = prompt(200, (2, 2), layers=1)
    p.k[0, :, 50] = 8 * p.q[0, :, -5:].mean(axis=1)  # a key that the last queries attend to
    for budget, last in ((64, 32), (40, 20)):  # two windows protect a whole one, a smaller budget its half
        kept = numpy_result(pykvedge.plan("snapkv", budget), p).kept[0][0]
        assert set(range(200 - last, 200)) <= set(kept.tolist()) and 50 in kept and len(kept) == budget


def test_a_prompt_no_longer_than_the_window_is_kept_whole(native):
    for n_tokens, kept_whole in ((31, True), (32, True), (33, False)):
        result = assert_same(pykvedge.plan("snapkv", 0.1), prompt(n_tokens))
        assert (len(result.kept[0][0]) == n_tokens) == kept_whole


def test_norms_keep_small_keys_and_large_values():
    p = prompt(50, layers=1)
    p.k[0, :, 7] *= 1e-3
    p.v[0, :, 9] *= 1e3
    assert numpy_result(pykvedge.plan("knorm", 1), p).kept[0][0].tolist() == [7]
    assert numpy_result(pykvedge.plan("vnorm", 1), p).kept[0][0].tolist() == [9]


def test_chance_depends_on_the_seed_alone():
    p, other = prompt(300, layers=2), prompt(300, layers=2, seed=5)
    first = numpy_result(pykvedge.plan("random"), p)
    np.testing.assert_array_equal(first.scores, numpy_result(pykvedge.plan("random"), other).scores)
    assert 0.45 < first.scores.mean() < 0.55 and first.scores.min() < 0.02 and first.scores.max() > 0.98
    assert len(np.unique(first.scores)) > 1150  # layers and heads differ
    seven = numpy_result(pykvedge.plan("random", **{"scorer.seed": 7}), p)
    assert abs(np.corrcoef(first.scores.ravel(), seven.scores.ravel())[0, 1]) < 0.1


def test_a_pyramid_gives_lower_layers_more():
    lengths = [len(heads[0]) for heads in numpy_result(pykvedge.plan("pyramidkv", 100), prompt(400, layers=6)).kept]
    assert lengths == sorted(lengths, reverse=True) and sum(lengths) == 600
    assert lengths[-1] == 32 + (100 - 32) // 20  # the window and base // beta
    steps = np.diff(lengths)
    assert steps.max() - steps.min() <= 1  # a straight line


def test_adaptive_heads_follow_the_attention():
    p = prompt(300, (2, 2), layers=1)
    p.k[0, 0] *= 0.05  # head 0 attends evenly
    p.k[0, 1, 20] = 6 * p.q[0, 1].mean(axis=0) + 3 * p.q[0, 1, -1]
    even, peaked = (
        len(h) for h in numpy_result(pykvedge.plan("adakv", 80, **{"allocator.normalize": False}), p).kept[0]
    )
    assert even + peaked == 160
    floor = 32 + int(0.2 * 48)
    assert min(even, peaked) >= floor and even != peaked


@pytest.mark.parametrize(("shares", "total", "most", "expected"), [
    ([1, 1, 1], 10, 10, [4, 3, 3]),
    ([3, 1, 0], 4, 4, [3, 1, 0]),
    ([9, 1, 0], 6, 3, [3, 3, 0]),
    ([9, 0, 0], 6, 3, [3, 2, 1]),  # all shares are 0: equal counts
    ([0, 0], 3, 2, [2, 1]),
    ([5], 5, 5, [5]),
    ([1, 1], 0, 4, [0, 0]),
])  # fmt: skip
def test_shares_become_whole_numbers(shares, total, most, expected):
    assert round_shares(np.array(shares, dtype=float), total, most).tolist() == expected


@pytest.mark.parametrize(("shares", "total", "most", "least", "expected"), [
    ([8, 1, 1], 10, 10, 2, [6, 2, 2]),  # the small heads need 2, the large head pays
    ([8, 3, 1], 12, 10, 2, [7, 3, 2]),  # 8 and 3 parts of 10
    ([9, 1, 0], 7, 4, 1, [4, 2, 1]),  # first the maximum, then the minimum
    ([90, 1, 1], 6, 5, 1, [4, 1, 1]),  # the rest is below the minimum of all: the full head pays
    ([0, 0, 0], 7, 5, 2, [3, 2, 2]),
    ([5, 0, 0], 6, 9, 2, [2, 2, 2]),
])  # fmt: skip
def test_every_share_is_at_least_the_least(shares, total, most, least, expected):
    assert round_shares(np.array(shares, dtype=float), total, most, least=least).tolist() == expected


@pytest.mark.parametrize("with_least", [False, True])
def test_shares_add_up_whatever_they_are(with_least):
    rng = np.random.default_rng(3)
    for _ in range(1000):
        n, most = int(rng.integers(1, 30)), int(rng.integers(1, 100))
        least = int(rng.integers(0, most + 1)) if with_least else 0
        total = int(rng.integers(n * least, n * most + 1))
        out = round_shares(rng.random(n) ** 6 * (rng.random(n) < 0.8), total, most, least=least)
        assert out.sum() == total and out.min() >= least and out.max() <= most


def test_settings_that_do_not_exist_or_do_not_fit():
    for settings, error in (
        ({"scorer.window": 16}, None),  # lookm's scorer: its recent window
        ({"scorer.kernel": 3}, UnknownNameError),
        ({"allocator.beta": 3}, UnknownNameError),
        ({"scorer.window": -1}, UsageError),
        ({"scorer.window": 2.5}, UsageError),
    ):
        if error is None:
            assert pykvedge.plan("lookm", 0.2, **settings).protected(200, 40) == (16, 0)
        else:
            with pytest.raises(error):
                pykvedge.plan("lookm", 0.2, **settings)
    with pytest.raises(UsageError, match="kernel"):
        pykvedge.plan("snapkv", 0.2, **{"scorer.kernel": 4})
