"""Allocator calibrated against plain loops: exact sums, the kept pairs of a session, profiles that do not fit."""

import itertools

import numpy as np
import oracles as oracles_of_rows
import oracles_budgets as oracles
import pytest
from arrays import prompt
from choosing import whole
from conftest import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity import assert_same

import pykvedge
from kvedge_lab.calibrate.samples import SEED, scenes
from pykvedge.models import profiles
from pykvedge.plans import profile
from pykvedge.plans.profile import Profile
from pykvedge.plans.registry import member
from pykvedge.reference.stages.base import ProfileTable, Prompt

NONE = np.zeros(0, dtype=np.float32)


def profile_of(shares):
    shares = np.asarray(shares, dtype=np.float64)
    return Profile("head-budgets", shares / shares.sum())


def counts_of(values, n_tokens, budget, recent=0, share_of="budget", measured=1.0):
    values = np.asarray(values, dtype=np.float32)
    shape = Prompt(np.zeros((*values.shape, n_tokens)), np.zeros(n_tokens, dtype=bool), budget, recent, (),
                   ProfileTable(values, NONE), fixed_recent=recent)  # fmt: skip
    chosen = {"share_of": share_of, "unmeasured": "refuse", "measured": measured}
    return member("allocator", "calibrated").allocate(shape, chosen)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), tail=st.sampled_from([0.02, 0.3, 5.0]), n_tokens=st.integers(2, 300),
    share=st.floats(0.01, 0.99), recent=st.integers(0, 40),
)  # fmt: skip
def test_counts_are_those_of_loops_and_add_up(seed, tail, n_tokens, share, recent):
    budget = min(max(1, int(n_tokens * share)), n_tokens - 1)
    recent = min(recent, budget)
    values = (np.random.default_rng(seed).gamma(tail, 1.0, (3, 2)) + 1e-6).astype(np.float32)
    found = counts_of(values, n_tokens, budget, recent)
    least = max(recent, 1)
    assert found.sum() == budget * 6 and found.min() >= least and found.max() <= n_tokens
    if budget > least:  # otherwise every head has the minimum
        wanted = oracles.calibrated(values.ravel().tolist(), budget * 6, n_tokens, least)
        off = np.abs(found.ravel() - wanted)
        assert off.max() <= 1 and off.sum() <= 2  # remainders closer than 1e-9 count as equal


def test_what_exceeds_the_prompt_goes_to_the_others_in_proportion():
    assert counts_of([[90, 4], [4, 2]], 100, 50).tolist() == [[100, 40], [40, 20]]
    assert counts_of([[90, 8], [1, 1]], 100, 60).tolist() == [[100, 100], [20, 20]]  # the maximum applies in two rounds
    assert counts_of([[1, 0], [0, 0]], 100, 2).tolist() == [[5, 1], [1, 1]]
    assert counts_of([[7, 1], [1, 1]], 100, 20, recent=12).tolist() == [[44, 12], [12, 12]]


def test_what_a_budget_has_beyond_the_measured_share_raises_those_that_have_least():
    for budget, counts in (
        (20, [[40, 20], [10, 10]]),
        (22, [[40, 20], [14, 14]]),
        (25, [[40, 20], [20, 20]]),
        (31, [[40, 28], [28, 28]]),
        (40, [[40, 40], [40, 40]]),
        (90, [[90, 90], [90, 90]]),
    ):
        assert counts_of([[4, 2], [1, 1]], 100, budget, measured=0.2).tolist() == counts
    assert counts_of([[4, 2], [1, 1]], 100, 50, measured=0.0).tolist() == [[50, 50], [50, 50]]
    assert counts_of([[0, 0], [0, 0]], 100, 50, measured=0.2).tolist() == [[50, 50], [50, 50]]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), tail=st.sampled_from([0.3, 5.0]), n_tokens=st.integers(10, 300),
    measured=st.floats(0.1, 0.5), more=st.integers(1, 200),
)  # fmt: skip
def test_beyond_the_measured_share_counts_are_those_of_loops(seed, tail, n_tokens, measured, more):
    least = int(np.floor(measured * n_tokens + 1e-9))
    budget = min(least + more, n_tokens - 1)
    values = (np.random.default_rng(seed).gamma(tail, 1.0, (3, 2)) + 1e-6).astype(np.float32)
    found = counts_of(values, n_tokens, budget, measured=measured)
    granted = oracles.shared(values.ravel().tolist(), least * 6, n_tokens, 1)
    wanted = oracles.calibrated(oracles.poured(granted, (budget - least) * 6), budget * 6, n_tokens, 1)
    off = np.abs(found.ravel() - wanted)
    assert off.max() <= 1 and off.sum() <= 2  # remainders closer than 1e-9 count as equal


def test_no_head_has_less_of_a_larger_budget():
    counts = [counts_of([[9, 3], [2, 2], [1, 1]], 600, budget, measured=0.1) for budget in range(30, 600, 7)]
    assert all((after >= before).all() for before, after in itertools.pairwise(counts))


def test_a_share_of_the_prompt_is_kept_whatever_the_budget():
    for budget in (1, 50):
        assert counts_of([[0.5, 0.115], [1.0, 0.0]], 100, budget, share_of="prompt").tolist() == [[50, 12], [100, 1]]


@pytest.mark.parametrize("scorer", ["mixkv", "window", "knorm"])
def test_a_model_that_nobody_measured_is_shared_out_by_the_prompt(native, scorer):
    """Without a profile, unmeasured = ada behaves as allocator ada with its defaults, in both engines."""
    settings_ = {"scorer": scorer, "recent": 1, "sinks": 1}
    by_prompt = pykvedge.plan("h2o", 0.2, allocator="calibrated", **settings_, **{"allocator.unmeasured": "ada"})
    plain, p = pykvedge.plan("h2o", 0.2, allocator="ada", **settings_), prompt(150, (4, 2), layers=3)
    assert by_prompt.does_without("allocator") and not plain.does_without("allocator")
    for engine in ("native", "numpy"):
        ours, wanted = (pykvedge.compress(one, *p.arguments, engine=engine) for one in (by_prompt, plain))
        for layer in range(3):
            for a, b in zip(ours.kept[layer], wanted.kept[layer], strict=True):
                assert a.tolist() == b.tolist()
    measured = pykvedge.compress(by_prompt, *p.arguments, profile=profile_of([[5, 1], [2, 2], [1, 1]]))
    assert [len(head) for head in measured.kept[0]] == [75, 15]  # an existing profile counts


@pytest.mark.parametrize("heads", [(4, 2), *whole(((4, 4),), ((4, 1),))])
def test_without_a_profile_heads_get_more_whose_values_vary(native, heads):
    """Compared with loops, in both engines. Text alone and larger budgets are shared as by allocator ada."""
    for n_tokens, strength in ((100, [1.0, 1.1, 1.3]), (160, [1.0, 3.0, 20.0])):  # the fourth power, and a lower one
        p = prompt(n_tokens, heads, layers=3)
        p.v[:] *= np.array(strength, dtype=np.float32)[:, None, None, None]
        plan, ada = (pykvedge.plan("kvedge", 0.1, allocator=name) for name in ("calibrated", "ada"))
        image, low = np.flatnonzero(p.image_mask), int(0.2 * p.image_mask.sum())
        logs = []
        for rows in p.v.astype(np.float16).reshape(-1, n_tokens, 32)[:, image].astype(float):
            away = oracles_of_rows.deviation(np.zeros((len(image), 1)), rows, low)
            logs.append(np.log(np.mean(np.sqrt(away))))
        logs = np.array(logs) - np.mean(logs)
        shares = np.exp(logs * min(4, 0.8 / logs.std()))
        wanted = oracles.calibrated(shares.tolist(), n_tokens // 10 * len(shares), n_tokens, 1)
        assert_same(plan, p)
        for engine in ("native", "numpy"):
            found = [len(head) for layer in pykvedge.compress(plan, *p.arguments, engine=engine).kept for head in layer]
            off = np.abs(np.array(found) - wanted)
            assert off.max() <= 1 and off.sum() <= 2 and min(found) < max(found) / 2
        for budget, mask in ((0.1, p.image_mask & False), (0.2, p.image_mask)):
            for engine in ("native", "numpy"):
                both = (one.with_(budget=budget) for one in (plan, ada))
                ours, usual = (pykvedge.compress(one, *p.arguments[:3], mask, engine=engine).kept for one in both)
                for a, b in zip(*map(itertools.chain.from_iterable, (ours, usual)), strict=True):
                    assert a.tolist() == b.tolist()


def test_a_head_keeps_what_it_was_granted(native):
    p, shares = prompt(250, (4, 2), layers=2), [[5, 1], [2, 2]]
    plan = pykvedge.plan("snapkv", 50, allocator="calibrated")
    for engine in ("native", "numpy"):
        kept = pykvedge.compress(plan, *p.arguments, engine=engine, profile=profile_of(shares)).kept
        assert [[len(head) for head in layer] for layer in kept] == [[100, 20], [40, 40]]
        assert set(range(240, 250)) <= set(kept[0][1].tolist())  # half of a small head is its last tokens


def test_a_session_finds_what_is_shipped_bounded_or_not(native):
    """For a question that comes with its image, and for a later question."""
    [sample] = itertools.islice(scenes("head-budgets", seed=9), 1)
    shares = profile.load(profiles.SHIPPED / profiles.file_name("head-budgets", profiles.hash_of(DEMO.model)))
    found = []
    assert shares.samples == 144 and f"--seed {SEED} --questions 3" in shares.about["made"]["command"]
    for bounded in (False, True):
        plan = pykvedge.plan("calibrated", 0.2)
        with DEMO.session(plan, bounded=bounded) as session:
            answer = session.ask(sample.question, sample.pictures)
            first, n, cache = session.engine.cache.lengths(), answer.report.tokens.prompt, session.engine.cache
            assert answer.read().strip() == sample.answer and answer.report.bounded in (None, True)
            wanted = oracles.calibrated(shares.table.values.ravel().tolist(), plan.count(n) * 10, n, 1)
            assert [count for layer in first for count in layer] == wanted
            session.ask("And now?").close()
            found.append([cache.tokens(i, h) for i in range(5) for h in range(2)])
    assert found[0] == found[1]
