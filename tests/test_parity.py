"""libkvedge against the NumPy definitions, for every member in the registry.

A new member is tested automatically: with a member of each other stage (pytest --all: with every one), on MHA, GQA and
MQA, for prompts of one token and of hundreds, with images in different places, at budgets from 5 % to everything.
"""

import itertools

import numpy as np
import pytest
from arrays import HEADS, LAYOUTS, profiles_of, projection_of, prompt
from choosing import crossed
from test_replay import CUTS, second_pass

import pykvedge
from pykvedge.library.native_plan import plan_budget, score_bytes
from pykvedge.plans.registry import STAGES, members
from pykvedge.reference.checks import rules
from pykvedge.reference.stages.rotation import Rotation

SCORERS, REDUCERS = list(members("scorer")), list(members("reducer"))
BUDGETS = (0.05, 0.1, 0.2, 0.5, 0.9, 1.0)
LENGTHS = (1, 2, 3, 5, 17, 64, 129, 256, 600)
# recent, sinks
PROTECTED = [(0, 0), (7, 0), (0.1, 0), (0.05, 4), (None, 4), (None, 400), (400, 0), (400, 400), (30, 30)]
RANKED = ["cumulative", "modal"]  # counts and protection come after the scores, so two scorers suffice


def plan_of(scorer, reducer="evict", budget=0.2, **settings):
    return pykvedge.plan("h2o", budget, scorer=scorer, reducer=reducer, **settings)


def assert_same(plan, p, kv_type="f16", threads=0):
    """Checks equal kept sets, and scores, keys and values within 1e-3."""
    return rules.engines_agree(plan, p, kv_type, threads)


def test_both_sides_have_the_same_members(native):
    for number, stage in enumerate(STAGES):
        found = (native.lib().kvedge_stage_name(number, i) for i in range(native.lib().kvedge_stage_count(number)))
        assert sorted(name.decode() for name in found) == sorted(members(stage))


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.1, 0.2, 1 / 3, 0.5, 0.9, 1.0])
def test_both_sides_round_budgets_alike(native, ratio):
    plan = pykvedge.plan("h2o", ratio)
    for n_tokens in (0, 1, 2, 3, 9, 10, 19, 20, 35, 50, 100, 240, 599, 600, 4096):
        assert plan_budget(plan, n_tokens) == plan.count(n_tokens)


def test_a_later_message_keeps_a_share_but_at_least_32_tokens(native):
    for n_tokens, kept in ((0, 0), (1, 1), (31, 31), (33, 32), (159, 32), (160, 32), (165, 33), (4096, 819)):
        assert plan_budget(pykvedge.plan("h2o", 0.2), n_tokens, later=True) == kept
        assert plan_budget(pykvedge.plan("h2o", 10), n_tokens, later=True) == min(n_tokens, 10)  # an absolute budget


def test_what_is_gathered_of_a_prompt_is_what_the_stages_look_at(native):
    layers = [(4, 2, 8)] * 3  # query heads, KV heads, head size
    pairs = 3 * 2 * 100
    for settings, expected in (
        ({"scorer": "knorm"}, 4 * pairs),  # only scores
        ({"scorer": "cumulative"}, (4 + 8) * pairs),
        ({"scorer": "mean"}, (4 + 16) * pairs),
        ({"scorer": "window", "scorer.window": 10}, 4 * pairs + 3 * 10 * 4 * 8 * 4),
        ({"scorer": "expected"}, 4 * pairs + 3 * 4 * (4 + 8 * (4 + 8) + 36 * 8)),
        ({"scorer": "replay"}, (4 + 4) * pairs),
        ({"scorer": "replay", "scorer.source": "repeat"}, (4 + 4) * pairs),
        ({"scorer": "replay", "scorer.projected": True}, (4 + 2 * (4 + 4)) * pairs),
        ({"scorer": "knorm", "decode": "heavy-hitter"}, (4 + 8) * pairs),
        ({"scorer": "knorm", "reducer": "match"}, 4 * pairs + 3 * 4 * 100 * (2 * 8 + 12)),
    ):
        assert score_bytes(pykvedge.plan("h2o", 0.2, **settings), 100, layers) == expected
    assert score_bytes(pykvedge.plan("full"), 100, layers) == 0


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("scorer", "reducer"), crossed(SCORERS, REDUCERS, ["pivotal"], ["cumulative"]))
def test_every_scorer_with_every_reducer(native, scorer, reducer, heads):
    for n_tokens in LENGTHS if heads == "gqa" else (2, 17, 129):
        assert_same(plan_of(scorer, reducer, text_prior=True), prompt(n_tokens, HEADS[heads]))


@pytest.mark.parametrize(("scorer", "budget"), crossed(SCORERS, [*BUDGETS, 1, 16, 5000], [0.2, 16], RANKED))
def test_every_budget(native, scorer, budget):
    for n_tokens in (1, 12, 130):
        assert_same(plan_of(scorer, "pivotal", budget), prompt(n_tokens))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("scorer", "prior"), crossed(SCORERS, [True, False], [True], RANKED))
def test_every_image_layout(native, scorer, layout, prior):
    for budget, overflow in ((0.1, "budget"), (0.1, "keep_all"), (0.6, "keep_all")):
        plan = plan_of(scorer, "averaged", budget, text_prior=prior, text_overflow=overflow)
        assert_same(plan, prompt(90, layout=layout))


@pytest.mark.parametrize(("scorer", "protected"), crossed(SCORERS, PROTECTED, [(0.05, 4)], RANKED))
def test_every_protection(native, scorer, protected):
    recent, sinks = protected
    for n_tokens in (1, 9, 100):
        assert_same(plan_of(scorer, "weighted", 0.3, recent=recent, sinks=sinks), prompt(n_tokens))


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("size", [8, 16, 40, 64, 80, 96, 128, 256])
def test_every_storage_type_and_head_size(native, kv_type, size):
    assert_same(plan_of("cumulative", "pivotal"), prompt(77, size=size), kv_type)


@pytest.mark.parametrize("reducer", REDUCERS)
def test_ties_and_keys_of_norm_zero(native, reducer):
    p = prompt(48)
    p.k[:, :, 10:20] = p.k[:, :, 10:11]  # equal keys: equal similarities
    p.k[:, :, 20:24] = 0
    p.q[:] = 0  # uniform attention
    assert_same(plan_of("cumulative", reducer, 0.5, recent=4), p)
    p.k[:] = 0
    assert_same(plan_of("cumulative", reducer, 0.5, recent=4), p)


@pytest.mark.parametrize(
    "settings",
    [*({"scorer": name} for name in SCORERS), *({"reducer": name} for name in REDUCERS), {"scorer.projected": True}],
    ids=str,
)
def test_the_number_of_threads_changes_nothing(native, settings):
    """With two KV heads, more threads share the rows of each head."""
    p = prompt(300, (6, 2))
    plan = pykvedge.plan("kvzip" if "scorer.projected" in settings else "h2o", 0.2, **settings)
    given = {
        "profile": profiles_of(plan, p),
        "projection": projection_of(plan, p),
        "rotation": Rotation.of(32) if plan.scorer == "expected" else None,
        "replay": second_pass(p, CUTS["three"](300)) if plan.scorer == "replay" else None,
    }
    one, *others = (pykvedge.compress(plan, *p.arguments, threads=n, **given) for n in (1, 0, 2, 5, 9))
    for many in others:
        np.testing.assert_array_equal(one.scores, many.scores)
        for layer, head in itertools.product(range(2), range(2)):
            for rows in ("kept", "k", "v", "bias"):
                np.testing.assert_array_equal(getattr(one, rows)[layer][head], getattr(many, rows)[layer][head])


def test_logits_as_large_as_real_models_have_them(native):
    p = prompt(150)
    p.q[:] *= 30
    assert_same(plan_of("cumulative", "pivotal"), p)


def test_no_image_mask_means_all_text(native):
    p = prompt(40, layout="text")
    plan = pykvedge.plan("lookm", 0.3)
    with_mask = pykvedge.compress(plan, *p.arguments)
    without = pykvedge.compress(plan, p.q, p.k, p.v)
    np.testing.assert_array_equal(with_mask.kept[0][0], without.kept[0][0])
