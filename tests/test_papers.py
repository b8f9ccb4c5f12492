"""MixKV, FlashCache, PrefixKV and Elastic Cache: the definitions against the papers' equations in plain loops."""

import itertools

import numpy as np
import oracles
import pytest
from arrays import defined, layer_of, prompt, prompt_of

import pykvedge
from pykvedge.plans.registry import member
from pykvedge.reference.stages.allocator.prefix import cumulative_priority, prefix_lengths
from pykvedge.reference.stages.base import Head, Prompt
from pykvedge.reference.stages.scorer.mixkv import directions, redundancy
from pykvedge.reference.stages.spectrum import cosines, cutoff

MIXKV = {"window": 8, "kernel": 5, "pool": "avg", "value": "vnorm", "mode": "headwise", "scale": "imp",
         "source": "online"}  # fmt: skip
DCT = {"gamma": 0.2, "share": "layer"}
ONLINE = {"source": "online"}


def test_one_importance_for_a_layer_is_the_mean_of_its_heads():
    layer = layer_of(prompt(30))
    score = member("scorer", "cumulative").score
    heads, shared = score(layer, {"share": "head"}), score(layer, {"share": "layer"})
    np.testing.assert_allclose(shared, [heads.mean(axis=0)] * 2, rtol=1e-12)
    assert not np.allclose(heads[0], heads[1])


# MixKV


@pytest.mark.parametrize("n_tokens", [2, 3, 17, 40])
def test_redundancy_is_the_mean_similarity_of_two_different_keys(n_tokens):
    for seed in range(5):
        k = prompt(n_tokens, seed=seed).k[0, 0] + seed / 2  # a larger offset makes keys more alike
        r = redundancy(directions(k).mean(axis=0), n_tokens)
        assert r == pytest.approx(oracles.redundancy(k.tolist()), abs=1e-9)
        assert 0 <= r <= 1


def test_redundancy_at_its_ends():
    one = np.ones((5, 8), dtype=np.float32)
    assert redundancy(directions(one).mean(axis=0), 5) == pytest.approx(1)
    assert redundancy(directions(one[:1]).mean(axis=0), 1) == 0
    opposed = np.array([[1.0] * 8, [-1.0] * 8])
    assert redundancy(directions(opposed).mean(axis=0), 2) == 0


@pytest.mark.parametrize("changed", [
    {}, {"value": "knorm"}, {"mode": "importance"}, {"mode": "diversity"}, {"mode": "even"}, {"scale": "ex"},
    {"pool": "max", "kernel": 3}, {"kernel": 1, "mode": "even", "scale": "ex"}, {"window": 20},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("n_tokens", [1, 8, 9, 10, 31])
def test_mixkv_scores_are_those_of_the_paper(n_tokens, changed):
    p, settings = prompt(n_tokens, (4, 2), size=8), {**MIXKV, **changed}
    scores = member("scorer", "mixkv").score(layer_of(p), settings)
    for h in range(2):
        expected = oracles.mixkv(p.q[0, 2 * h : 2 * h + 2].tolist(), p.k[0, h].tolist(), p.v[0, h].tolist(), settings)
        np.testing.assert_allclose(scores[h], expected, rtol=1e-7, atol=1e-12)


def test_the_window_scores_as_in_snapkv():
    p = prompt(60)
    snapkv = member("scorer", "window").score(layer_of(p), {"window": 8, "kernel": 5, "pool": "avg", "gqa": "mean"})
    np.testing.assert_array_equal(member("scorer", "mixkv").score(layer_of(p), MIXKV)[:, -8:], snapkv[:, -8:])
    p.v[:] = 1  # all values alike: importance is attention
    importance = member("scorer", "mixkv").score(layer_of(p), {**MIXKV, "mode": "importance"})
    np.testing.assert_array_equal(importance, snapkv)


def test_a_key_that_differs_is_kept_where_the_others_are_alike():
    p = prompt(80, (1, 1), layers=1)
    p.k[:] = 1 + 0.1 * p.k
    p.k[0, 0, 30] = np.where(np.arange(32) % 2, 1, -1)
    headwise, importance = (
        defined(pykvedge.plan("mixkv", 36, recent=32, **{"scorer.mode": mode}), p).kept[0][0]
        for mode in ("headwise", "importance")
    )
    assert 30 in headwise and 30 not in importance
    assert set(range(48, 80)) <= set(headwise.tolist())


def test_what_is_constant_or_zero_gives_numbers():
    p = prompt(40)
    p.k[:, 0], p.v[:] = 0, 0
    for value, mode in itertools.product(("vnorm", "knorm"), ("headwise", "importance", "diversity", "even")):
        scores = member("scorer", "mixkv").score(layer_of(p), {**MIXKV, "value": value, "mode": mode})
        assert np.isfinite(scores).all()


# KeyDiff


@pytest.mark.parametrize("anchor", ["unit", "mean"])
@pytest.mark.parametrize("n_tokens", [1, 2, 31])
def test_keydiff_scores_are_minus_the_cosine_with_the_anchor(n_tokens, anchor):
    p = prompt(n_tokens, (4, 2), size=8)
    scores = member("scorer", "keydiff").score(layer_of(p), {"anchor": anchor})
    for h in range(2):
        np.testing.assert_allclose(scores[h], oracles.keydiff(p.k[0, h].tolist(), anchor == "unit"), atol=1e-12)


def test_keydiff_orders_tokens_as_mixkvs_diversity_does():
    p = prompt(50, (4, 2), size=16)
    mixkv = member("scorer", "mixkv").score(layer_of(p), {**MIXKV, "mode": "diversity"})[:, :-8]  # except its window
    keydiff = member("scorer", "keydiff").score(layer_of(p), {"anchor": "unit"})[:, :-8]
    np.testing.assert_array_equal(np.argsort(keydiff), np.argsort(mixkv))


def test_keydiff_of_keys_that_say_nothing():
    p = prompt(6, (1, 1), size=8, layers=1)
    p.k[:] = 0
    for anchor in ("unit", "mean"):
        assert not member("scorer", "keydiff").score(layer_of(p), {"anchor": anchor}).any()
    p.k[0, 0, :3], p.k[0, 0, 3:] = 1, -1  # the anchor is zero
    assert not member("scorer", "keydiff").score(layer_of(p), {"anchor": "unit"}).any()
    assert defined(pykvedge.plan("keydiff", 2, recent=0), p).kept[0][0].tolist() == [0, 1]  # equal: the first ones


# FlashCache


@pytest.mark.parametrize("gamma", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 10, 23])
def test_dct_scores_are_the_deviation_from_the_base(n_tokens, gamma):
    p = prompt(n_tokens, size=8)
    w = min(n_tokens, max(1, int(gamma * n_tokens + 1e-9)))
    assert cutoff(gamma, n_tokens) == w
    expected = [oracles.deviation(p.k[0, h].tolist(), p.v[0, h].tolist(), w) for h in range(2)]
    score = member("scorer", "dct").score
    np.testing.assert_allclose(score(layer_of(p), {"gamma": gamma, "share": "head"}), expected, rtol=1e-9, atol=1e-12)
    shared = score(layer_of(p), {"gamma": gamma, "share": "layer"})
    np.testing.assert_allclose(shared, [np.mean(expected, axis=0)] * 2, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n_tokens", [2, 9, 64])
def test_the_transform_keeps_all_energy(n_tokens):
    x = prompt(n_tokens).k[0, 0, :, 0].astype(np.float64)
    bins = oracles.dct(x.tolist())
    assert np.square(bins).sum() == pytest.approx(np.square(x).sum())  # Parseval
    rows = cosines(1, n_tokens, n_tokens)
    np.testing.assert_allclose(rows @ x, bins[1:], atol=1e-9)
    np.testing.assert_allclose(rows @ rows.T, np.eye(n_tokens - 1), atol=1e-12)


def test_a_wider_base_leaves_less_to_stand_out():
    layer = layer_of(prompt(100))
    gammas = (0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1)
    left = [member("scorer", "dct").score(layer, {**DCT, "gamma": gamma}).sum() for gamma in gammas]
    assert (np.diff(left) < 0).all() and left[-1] == 0


def test_an_outlier_on_a_smooth_curve_is_kept():
    p = prompt(200, layers=1)
    curve = np.cos(np.pi * np.arange(200) / 100)[:, None]
    p.k[:], p.v[:] = curve, 2 - curve
    p.v[0, 1, 77] += 3  # one head decides the layer's score, so both keep it
    p.k[0, 0, 140] -= 3
    kept = defined(pykvedge.plan("flashcache", 10), p).kept[0]
    assert {77, 140} <= set(kept[0].tolist()) and kept[0].tolist() == kept[1].tolist()


def test_what_is_the_same_everywhere_is_a_tie():
    p = prompt(50)
    p.k[:], p.v[:] = 0.3, -7.1
    assert defined(pykvedge.plan("flashcache", 5), p).kept[1][0].tolist() == [0, 1, 2, 3, 4]
    two = prompt(2)  # both are equally far from their mean
    assert defined(pykvedge.plan("flashcache", 1), two).kept[0][0].tolist() == [0]


@pytest.mark.parametrize("gamma", [0.05, 0.1, 0.2])
def test_spectral_shares_are_in_proportion_to_the_high_energy(gamma):
    p = prompt(24, layers=4, size=8)
    for i in range(4):  # from a rough layer to a smooth one
        p.k[i] = np.cumsum(p.k[i], axis=1) if i > 1 else p.k[i]
        p.v[i] = np.cumsum(p.v[i], axis=1) if i % 2 else p.v[i]
    w = int(24 * gamma + 1e-9)
    r = [oracles.high_energy(p.k[i].tolist(), w) + oracles.high_energy(p.v[i].tolist(), w) for i in range(4)]
    counts = member("allocator", "spectral").allocate(prompt_of(p, 8), {"gamma": gamma})
    assert counts.shape == (4, 2) and (counts[:, 0] == counts[:, 1]).all() and counts[:, 0].sum() == 32
    share = np.array(r) / sum(r) * 32
    assert share.min() >= 1 and share.max() <= 24  # no limit is reached
    assert (np.abs(counts[:, 0] - share) < 1).all()
    assert counts[0, 0] > counts[3, 0]


def test_spectral_shares_stay_within_their_bounds():
    allocate = member("allocator", "spectral").allocate
    p = prompt(30, layers=3)
    p.k[1:] = p.v[1:] = 1  # only the first layer has high frequencies
    assert allocate(prompt_of(p, 9), DCT)[:, 0].tolist() == [25, 1, 1]
    assert allocate(prompt_of(p, 9, recent=4), DCT)[:, 0].tolist() == [19, 4, 4]
    assert allocate(prompt_of(p, 20), DCT)[:, 0].tolist() == [30, 15, 15]
    p.k[:] = p.v[:] = 1
    assert allocate(prompt_of(p, 9), DCT)[:, 0].tolist() == [9, 9, 9]
    p.k[:] = p.v[:] = 0
    assert allocate(prompt_of(p, 9), DCT)[:, 0].tolist() == [9, 9, 9]
    assert allocate(prompt_of(prompt(30), 9), {"gamma": 1.0})[:, 0].tolist() == [9, 9]


# PrefixKV


def skewed_scores(n_layers=6, n_tokens=120, seed=1):
    """Returns scores [L, 2, T]: the first layer attends to few tokens, the last to all."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.random((2, n_tokens)) ** power for power in np.linspace(9, 1, n_layers)])


@pytest.mark.parametrize("budget", [3, 12, 24, 60, 110])
def test_prefixes_keep_the_same_mass_of_every_layer(budget):
    scores = skewed_scores()
    priority = cumulative_priority(scores)
    lengths = prefix_lengths(priority, budget * 6)
    assert lengths.sum() == budget * 6
    kept = priority[np.arange(6), lengths - 1]
    assert kept.max() - kept.min() <= priority[:, 0].max()  # the first of each row is its largest weight
    counts = member("allocator", "prefix").allocate(Prompt(scores, np.zeros(120, dtype=bool), budget), ONLINE)
    assert counts.tolist() == [[n, n] for n in lengths]
    assert lengths[0] < lengths[-1]  # fewer tokens where few of them matter


def test_prefix_lengths_are_the_shortest_that_reach_the_share():
    priority = cumulative_priority(skewed_scores(n_layers=4, n_tokens=25))
    for target in (4, 10, 50, 99, 100):
        lengths = prefix_lengths(priority, target).tolist()
        sums = []
        for p in sorted({float(x) for row in priority for x in row}):  # every share where a length changes
            sums.append([next(n + 1 for n in range(25) if row[n] >= p - 1e-12) for row in priority.tolist()])
        assert abs(sum(lengths) - target) == min(abs(sum(s) - target) for s in sums)
        assert lengths in sums


def test_equal_importance_is_shared_out_evenly():
    mask = np.zeros(201, dtype=bool)
    allocate = member("allocator", "prefix").allocate
    same = np.tile(np.random.default_rng(0).random((1, 1, 201)), (32, 2, 1))
    for scores in (np.ones((32, 2, 201)), np.zeros((32, 2, 201)), -np.ones((32, 2, 201)), same):
        counts = allocate(Prompt(scores, mask, 40), ONLINE)
        assert counts.sum() == 32 * 2 * 40 and counts.min() >= 39 and counts.max() <= 41


def test_a_layer_never_keeps_less_than_what_is_protected():
    scores = skewed_scores()
    scores[0, :, 1:] = 0  # one token has all the attention
    mask = np.zeros(120, dtype=bool)
    counts = member("allocator", "prefix").allocate(Prompt(scores, mask, 24), ONLINE)
    assert counts[0, 0] == 1 and counts[:, 0].sum() == 24 * 6
    counts = member("allocator", "prefix").allocate(Prompt(scores, mask, 24, recent=12), ONLINE)
    assert counts[0, 0] == 12 and counts[:, 0].sum() == 24 * 6


# Elastic Cache and PrefixKV's merging


@pytest.mark.parametrize("n_tokens", [3, 9, 40])
@pytest.mark.parametrize("into_protected", [True, False])
def test_buckets_are_the_equations_of_the_paper(n_tokens, into_protected):
    p = prompt(n_tokens, layers=1, size=8)
    plan = pykvedge.plan("h2o", 0.4, reducer="bucket", sinks=1, recent=2, **{"reducer.into_protected": into_protected})
    result = defined(plan, p)
    recent, sinks = plan.protected(n_tokens, plan.count(n_tokens))
    protected = {*range(sinks), *range(n_tokens - recent, n_tokens)}
    for h in range(2):
        kept = result.kept[0][h].tolist()
        anchors = [j for j in kept if into_protected or j not in protected]
        for ours, rows in ((result.k[0][h], p.k[0, h]), (result.v[0][h], p.v[0, h])):
            np.testing.assert_allclose(ours, oracles.merge_nearest(rows.tolist(), kept, anchors), rtol=1e-5, atol=1e-6)
            for i, j in enumerate(kept):
                assert into_protected or j not in protected or (ours[i] == rows[j]).all()


@pytest.mark.parametrize("n_tokens", [2, 9, 40])
def test_position_merges_into_every_kept_token(n_tokens):
    p = prompt(n_tokens, layers=1, size=8)
    result = defined(pykvedge.plan("h2o", 0.4, reducer="position", sinks=1), p)
    for h in range(2):
        kept = result.kept[0][h].tolist()
        expected = oracles.merge_nearest(p.k[0, h].tolist(), kept, kept)
        np.testing.assert_allclose(result.k[0][h], expected, rtol=1e-5, atol=1e-6)


def head(n_tokens, kept, protected=()):
    rows = 2.0 ** np.arange(n_tokens)[:, None] * np.ones(8)
    mask = np.isin(np.arange(n_tokens), protected)
    return Head(rows.astype(np.float32), -rows.astype(np.float32), np.array(kept, dtype=np.int32), mask)


def test_a_token_halfway_goes_to_the_left():
    k, v = member("reducer", "position").reduce(head(7, [1, 5]), {})
    assert k[:, 0].tolist() == [(1 + 2 + 4 + 8) / 4, (16 + 32 + 64) / 3]
    np.testing.assert_array_equal(v, -k)


def test_protected_tokens_receive_only_where_they_are_asked_to():
    reduce = member("reducer", "bucket").reduce
    h = head(8, [0, 3, 7], [0, 7])
    assert reduce(h, {"into_protected": False})[0][:, 0].tolist() == [1, (2 + 4 + 8 + 16 + 32 + 64) / 6, 128]
    assert reduce(h, {"into_protected": True})[0][:, 0].tolist() == [(1 + 2) / 2, (4 + 8 + 16 + 32) / 4, (64 + 128) / 2]
    alone = head(8, [0, 7], [0, 7])  # no token can receive merges: eviction
    assert reduce(alone, {"into_protected": False})[0][:, 0].tolist() == [1, 128]


def test_merging_by_feature_is_the_averaged_merge_of_lookm():
    assert pykvedge.plan("h2o", 0.3, reducer="feature") == pykvedge.plan("h2o", 0.3, reducer="averaged")
