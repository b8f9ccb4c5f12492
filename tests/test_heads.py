"""Budgets from calibrated profiles: SparseMM and HeadKV in plain loops, exact totals, and PrefixKV offline."""


import numpy as np
import pytest
from arrays import profiles_of, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

import pykvedge
from pykvedge import Profile, UsageError
from pykvedge.plans.registry import member
from pykvedge.reference.stages.allocator.prefix import calibrated
from pykvedge.reference.stages.base import ProfileTable, Prompt

RULES = {"sparsemm": {"ratio": 0.1, "beta": 1.5}, "headkv": {"ratio": 0.1, "beta": 1.5}}
DEFAULTS = {"rule": "sparsemm", "ratio": 0.1, "beta": 1.5, "power": 1.0, "rounding": "exact"}


def counts_of(scores, n_heads_kv, n_tokens, budget, recent, **changed):
    """Returns the counts of the definition."""
    scores = np.asarray(scores, dtype=np.float64)
    table = ProfileTable(scores.astype(np.float32), np.zeros(0, dtype=np.float32))
    empty = np.zeros((len(scores), n_heads_kv, n_tokens))
    given_ = Prompt(empty, np.zeros(n_tokens, dtype=bool), budget, recent, (), table)
    return member("allocator", "heads").allocate(given_, {**DEFAULTS, **changed})


def sparsemm(scores, group, budget, window, ratio):
    """Returns real-valued budgets of KV heads by SparseMM (section 11 of its description): the SUM over the group."""
    total, n_kv = sum(map(sum, scores)), sum(len(row) // group for row in scores)
    base = budget - window
    least = int(base * ratio)
    remain = (base - least) * n_kv
    return [[sum(row[i : i + group]) / total * remain + least + window for i in range(0, len(row), group)]
            for row in scores]  # fmt: skip


def headkv(scores, group, budget, window, beta):
    """Returns real-valued budgets by HeadKV: one for each query head, then the MEAN over the group."""
    total, n_heads = sum(map(sum, scores)), sum(map(len, scores))
    base = budget - window
    pool = base // beta
    heads = [[x / total * pool * n_heads + base - pool + window for x in row] for row in scores]
    return [[sum(row[i : i + group]) / group for i in range(0, len(row), group)] for row in heads]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("rule", ["sparsemm", "headkv"])
def test_budgets_are_those_of_the_papers_where_none_exceeds_the_prompt(rule, group):
    scores = np.random.default_rng(1).random((3, 4)).astype(np.float32).tolist()
    for n_tokens, budget, window in ((600, 120, 32), (300, 60, 8), (90, 20, 1)):
        if rule == "sparsemm":
            real = sparsemm(scores, group, budget, window, 0.1)
        else:
            real = headkv(scores, group, budget, window, 1.5)
        found = counts_of(scores, 4 // group, n_tokens, budget, window, rule=rule)
        assert found.shape == (3, 4 // group) and found.sum() == budget * found.size
        assert np.abs(found - real).max() < 1
        official = counts_of(scores, 4 // group, n_tokens, budget, window, rule=rule, rounding="official")
        assert official.tolist() == np.rint(real).tolist()


def test_what_exceeds_the_prompt_goes_to_the_others():
    scores = [[1000, 1, 2, 1], [1, 1, 1, 1]]
    found = counts_of(scores, 4, 100, 50, 10)
    assert found[0, 0] == 100 and found.sum() == 8 * 50
    assert found[0, 2] > found[0, 1] and found.min() >= 10 + 4  # the window, and the tenth of 40 that every head gets
    official = counts_of(scores, 4, 100, 50, 10, rounding="official")
    assert official[0, 0] == 100 and official.sum() < 0.5 * 8 * 50  # the released code loses most of the budget


def test_scores_of_equal_heads_and_power_zero_are_the_even_budget():
    for scores, changed in (([[2, 2], [2, 2]], {}), ([[0, 9], [1, 4]], {"power": 0.0}), ([[0, 0], [0, 0]], {})):
        assert counts_of(scores, 2, 50, 20, 3, **changed).tolist() == [[20, 20], [20, 20]]
    sharper = counts_of([[1, 2], [1, 2]], 2, 500, 100, 0, power=3.0)
    assert sharper[0, 1] > counts_of([[1, 2], [1, 2]], 2, 500, 100, 0)[0, 1]


def test_a_group_counts_with_all_of_its_heads():
    alone, beside = counts_of([[8, 0, 1, 1]], 2, 400, 80, 4), counts_of([[4, 4, 1, 1]], 2, 400, 80, 4)
    assert alone.tolist() == beside.tolist() and alone[0, 0] > alone[0, 1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), tail=st.sampled_from([0.02, 0.3, 5.0]), n_tokens=st.integers(2, 300),
    share=st.floats(0.01, 0.99), recent=st.integers(0, 40), rule=st.sampled_from(["sparsemm", "headkv"]),
)  # fmt: skip
def test_totals_are_exact_whatever_the_scores(seed, tail, n_tokens, share, recent, rule):
    budget = min(max(1, int(n_tokens * share)), n_tokens - 1)
    recent = min(recent, budget)
    scores = np.random.default_rng(seed).gamma(tail, 1.0, (3, 4))
    found = counts_of(scores, 2, n_tokens, budget, recent, rule=rule)
    assert found.sum() == budget * 6 and found.min() >= max(recent, 1) and found.max() <= n_tokens


def test_heads_keep_what_they_were_granted(native):
    p = prompt(200, (4, 2), layers=3)
    plan = pykvedge.plan("sparsemm", 70)
    [profile] = profiles_of(plan, p)
    kept = pykvedge.compress(plan, *p.arguments, profile=profile).kept
    expected = counts_of(profile.values, 2, 200, 70, 32)
    assert [[len(head) for head in layer] for layer in kept] == expected.tolist()
    assert len(set(expected.ravel().tolist())) > 2
    assert all(set(range(168, 200)) <= set(head.tolist()) for layer in kept for head in layer)


def test_presets_name_their_rule_and_profile():
    for kind, names in (
        ("visual-heads", ("sparsemm", "mixkv-sparsemm")),
        ("retrieval-heads", ("headkv", "mixkv-headkv")),
    ):
        assert all(pykvedge.plan(name).profile_kinds() == {"allocator": kind} for name in names)
    assert pykvedge.plan("mixkv-headkv").scorer == "mixkv" and pykvedge.plan("headkv").settings("scorer")["window"] == 8
    assert not any(pykvedge.plan(name).profile_kinds() for name in ("prefixkv", "lookm", "mixkv"))
    assert pykvedge.plan("prefixkv", **{"allocator.source": "profile"}).profile_kinds() == {"allocator": "prefix"}
    both = pykvedge.plan("mixkv-sparsemm", **{"scorer.source": "profile"})
    assert both.profile_kinds() == {"scorer": "key-redundancy", "allocator": "visual-heads"}
    without = both.with_(params={**both.params, "scorer.mode": "even"})  # this mode ignores the profile
    assert without.profile_kinds() == {"allocator": "visual-heads"}


# PrefixKV, offline


def test_shares_are_met_at_calibrated_budgets_and_lie_between_them_elsewhere():
    table = ProfileTable(np.array([[0.1, 0.3], [0.3, 0.7]], np.float32), np.array([0.2, 0.5], np.float32))
    np.testing.assert_allclose(calibrated(table, 0.2), [0.1, 0.3], rtol=1e-6)
    np.testing.assert_allclose(calibrated(table, 0.5), [0.3, 0.7], rtol=1e-6)
    np.testing.assert_allclose(calibrated(table, 0.35), [0.2, 0.5], rtol=1e-6)
    np.testing.assert_allclose(calibrated(table, 0.1), [0.05, 0.15], rtol=1e-6)
    np.testing.assert_allclose(calibrated(table, 0.75), [0.65, 0.85], rtol=1e-6)


def test_layers_keep_their_calibrated_shares(native):
    p = prompt(300, (4, 2), layers=3)
    profile = Profile("prefix", np.array([[0.05], [0.2], [0.35]]), (0.2,))
    plan = pykvedge.plan("prefixkv", 0.2, **{"allocator.source": "profile"})
    for engine in ("native", "numpy"):
        kept = pykvedge.compress(plan, *p.arguments, engine=engine, profile=profile).kept
        assert [[len(head) for head in layer] for layer in kept] == [[15, 15], [60, 60], [105, 105]]


def test_rows_belong_to_the_layers_of_the_model(native, tiny, tmp_path):
    """llama.cpp keeps gemma3's sliding-window layers, so only the profile's other rows count."""
    model = tiny("gemma3")
    with model.session() as session:
        n_layers = session.model.n_layer
        session.ask("Good morning, how are you today?").read()
        stored, query_heads = session.engine.cache.layer_ids(), 4
        assert 0 < len(stored) < n_layers
        query_heads = native.lib().kvedge_query_heads(session.engine.cache.handle, 0)
    values = np.full((n_layers, query_heads), 1000.0)
    values[stored] = np.random.default_rng(0).random((len(stored), query_heads))
    plan = pykvedge.plan("sparsemm", 30, **{"scorer.window": 4})
    with model.session(plan, profile=Profile("visual-heads", values)) as session:
        answer = session.ask("The quick brown fox jumps over the lazy dog. " * 6)
        found, n = session.engine.cache.lengths(), answer.report.tokens.prompt
    expected = counts_of(values[stored], len(found[0]), n, 30, 4)
    assert found == expected.tolist()
    for shape in ((len(stored), query_heads), (n_layers, query_heads + 1)):
        with model.session(plan, profile=Profile("visual-heads", np.ones(shape))) as session:  # noqa: SIM117
            with pytest.raises(UsageError, match="belongs to another model"):
                session.ask("Hello")
