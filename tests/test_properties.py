"""Properties that hold for every prompt, checked on random ones, for both engines."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import LAYOUTS, prompt
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import pykvedge
from pykvedge.definition import round_to
from pykvedge.stages.registry import members

ENGINES = ("native", "numpy")

prompts = st.builds(
    prompt,
    n_tokens=st.integers(1, 80),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    layers=st.just(2),
    size=st.sampled_from([8, 16, 24]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 10**6),
)
budgets = st.one_of(st.floats(0.02, 1.0), st.integers(8, 100))
plans = st.builds(
    lambda scorer, reducer, budget, prior, sinks, recent: pykvedge.plan(
        "h2o", budget, scorer=scorer, reducer=reducer, text_prior=prior, sinks=sinks, recent=recent
    ),
    scorer=st.sampled_from(list(members("scorer"))),
    reducer=st.sampled_from(list(members("reducer"))),
    budget=budgets,
    prior=st.booleans(),
    sinks=st.integers(0, 4),
    recent=st.one_of(st.none(), st.integers(0, 4)),
)
# derandomised: in one of some thousand heads two similarities differ by less than float32 can tell
few = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def run(plan, p, engine):
    return pykvedge.compress(plan, *p.arguments, engine=engine)


def heads_of(result):
    return [(i, h) for i, layer in enumerate(result.kept) for h in range(len(layer))]


@each_engine
@few
@given(plans, prompts)
def test_the_budget_is_met_exactly(native, engine, plan, p):
    result = run(plan, p, engine)
    n_tokens, size = p.k.shape[2:]
    for i, h in heads_of(result):
        kept = result.kept[i][h]
        assert len(kept) == plan.count(n_tokens)
        assert kept.dtype == np.int32 and (np.diff(kept) > 0).all()
        assert kept[0] >= 0 and kept[-1] < n_tokens
        assert result.k[i][h].shape == result.v[i][h].shape == (len(kept), size)
    assert result.scores.shape == (2, p.k.shape[1], n_tokens)


@each_engine
@few
@given(plans, prompts)
def test_protected_tokens_are_kept(native, engine, plan, p):
    n_tokens = p.k.shape[2]
    recent, sinks = plan.protected(n_tokens, plan.count(n_tokens))
    protected = {*range(min(sinks, n_tokens)), *range(n_tokens - recent, n_tokens)}
    result = run(plan, p, engine)
    for i, h in heads_of(result):
        assert protected <= set(result.kept[i][h].tolist())


@each_engine
@few
@given(plans, prompts)
def test_a_budget_of_everything_changes_nothing(native, engine, plan, p):
    result = run(plan.with_(budget=1.0), p, engine)
    for i, h in heads_of(result):
        assert result.kept[i][h].tolist() == list(range(p.k.shape[2]))
        np.testing.assert_array_equal(result.k[i][h], round_to(p.k[i, h], "f16"))
        np.testing.assert_array_equal(result.v[i][h], round_to(p.v[i, h], "f16"))


@each_engine
@few
@given(plans, prompts, st.randoms(use_true_random=False))
def test_the_order_of_heads_does_not_matter(native, engine, plan, p, random):
    assume(plan.scorer != "random")  # chance depends on the place
    group = p.q.shape[1] // p.k.shape[1]
    order = list(range(p.k.shape[1]))
    random.shuffle(order)
    query_order = [h * group + g for h in order for g in range(group)]
    result = run(plan, p, engine)
    shuffled = pykvedge.compress(plan, p.q[:, query_order], p.k[:, order], p.v[:, order], p.image_mask, engine=engine)
    for i, h in heads_of(result):
        j = order.index(h)
        np.testing.assert_array_equal(shuffled.kept[i][j], result.kept[i][h])
        np.testing.assert_array_equal(shuffled.k[i][j], result.k[i][h])


@each_engine
@few
@given(plans, prompts)
def test_layers_do_not_see_each_other(native, engine, plan, p):
    assume(plan.scorer != "random")
    both = run(plan, p, engine)
    second = pykvedge.compress(plan, p.q[1:], p.k[1:], p.v[1:], p.image_mask, engine=engine)
    for h in range(p.k.shape[1]):
        np.testing.assert_array_equal(both.kept[1][h], second.kept[0][h])
        np.testing.assert_array_equal(both.v[1][h], second.v[0][h])


@each_engine
@few
@given(plans, prompts)
def test_evicting_keeps_rows_as_they_were(native, engine, plan, p):
    result = run(plan.with_(reducer="evict"), p, engine)
    for i, h in heads_of(result):
        np.testing.assert_array_equal(result.k[i][h], round_to(p.k[i, h], "f16")[result.kept[i][h]])


@each_engine
@few
@given(plans, prompts)
def test_merged_values_stay_within_the_range_of_the_prompt(native, engine, plan, p):
    for reducer in ("averaged", "pivotal"):
        result = run(plan.with_(reducer=reducer), p, engine)
        for i, h in heads_of(result):
            low, high = p.v[i, h].min(axis=0) - 1e-2, p.v[i, h].max(axis=0) + 1e-2
            assert (result.v[i][h] >= low).all() and (result.v[i][h] <= high).all()


@each_engine
@few
@given(prompts, st.floats(0.05, 0.95))
def test_text_is_never_dropped_for_an_image(native, engine, p, ratio):
    plan = pykvedge.plan("lookm", ratio, recent=0)
    result = run(plan, p, engine)
    for i, h in heads_of(result):
        kept = result.kept[i][h]
        n_text = int((~p.image_mask).sum())
        kept_text = int((~p.image_mask[kept]).sum())
        if p.image_mask.any() and not p.image_mask.all():
            assert kept_text == min(n_text, len(kept))


@few
@given(plans, prompts)
def test_both_engines_agree(native, plan, p):
    ours, definition = run(plan, p, "native"), run(plan, p, "numpy")
    for i, h in heads_of(ours):
        np.testing.assert_array_equal(ours.kept[i][h], definition.kept[i][h])
        np.testing.assert_allclose(ours.k[i][h], definition.k[i][h], rtol=1e-3, atol=1e-3)
