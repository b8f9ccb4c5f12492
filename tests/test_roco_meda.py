"""RoCo and MEDA: the definitions against the papers' equations in plain loops; rounding as in released code."""

import math

import numpy as np
import oracles
import pytest
from arrays import defined, layer_of, prompt, prompt_of
from batches import send
from contexts import TinyContext
from test_parity import assert_same

import pykvedge
from pykvedge.plans.registry import member
from pykvedge.reference.engine import select
from pykvedge.reference.stages.allocator.entropy import layer_shares
from pykvedge.reference.stages.base import Prompt

# RoCo


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("n_tokens", [1, 2, 9, 24])
def test_moments_are_of_the_queries_that_saw_a_token(n_tokens, heads):
    p, roco = prompt(n_tokens, heads, layers=1, size=8), member("scorer", "mean")
    group = heads[0] // heads[1]
    for h in range(heads[1]):
        q = [p.q[0, h * group + g].tolist() for g in range(group)]
        means, deviations = oracles.mean_and_deviation(q, p.k[0, h].tolist())
        np.testing.assert_allclose(roco.score(layer_of(p), {})[h], means, rtol=1e-9)
        np.testing.assert_allclose(roco.reserve(layer_of(p), {})[h], deviations, atol=1e-7)
        assert roco.reserve(layer_of(p), {})[h][-1] == 0  # the last token is seen once


def test_early_tokens_gain_nothing_from_being_seen_by_more():
    p = prompt(50, layers=1)
    p.q[:] = 0  # uniform attention: query m pays 1 / (m + 1) to each token
    scores = member("scorer", "mean").score(layer_of(p), {})[0]
    np.testing.assert_allclose(scores[0], sum(1 / m for m in range(1, 51)) / 50)
    np.testing.assert_allclose(scores[49], 1 / 50)
    assert scores[0] / scores[49] < 5  # their column sums: 225 to 1


@pytest.mark.parametrize("n_tokens", [6, 30, 57])
@pytest.mark.parametrize("ratio", [0.1, 0.35, 0.5, 0.9])
def test_roco_keeps_sinks_the_end_what_varies_and_the_largest_means(n_tokens, ratio):
    p, n = prompt(n_tokens, layers=1), oracles.budget(n_tokens, ratio)
    kept = defined(pykvedge.plan("roco", ratio), p).kept[0]
    for h in range(2):
        moments = oracles.mean_and_deviation([p.q[0, 2 * h + g].tolist() for g in range(2)], p.k[0, h].tolist())
        assert kept[h].tolist() == oracles.robust(*moments, n)


def test_what_varies_comes_first_whatever_its_mean():
    means, deviations = np.arange(100.0), np.zeros(100)
    deviations[[10, 20, 30]] = 1
    image = np.arange(100) < 40
    plan = pykvedge.plan("roco", 0.2, sinks=0)
    assert set(select(plan, means, image, 20, deviations)) == {10, 20, 30, 0, 1, 2, *range(86, 100)}
    assert set(select(plan, means, image, 20, None)) == set(range(80, 100))
    none = plan.with_(params={"scorer.spread": 0.0})
    assert set(select(none, means, image, 20, deviations)) == set(range(80, 100))


def test_text_outranks_images_in_both_turns():
    means, deviations = np.arange(100.0), np.zeros(100)
    deviations[[10, 20, 30, 50]] = 4, 3, 2, 1
    image = (np.arange(100) < 40) | (np.arange(100) >= 60)
    plan = pykvedge.plan("roco", 0.2, sinks=0, recent=0, text_prior=True)
    assert set(select(plan, means, image, 15, deviations)) == {50, 40, 41, 42, 48, 49, *range(51, 60)}
    more = select(plan, means, image, 40, deviations)
    assert set(more) == {*range(40, 60), *range(80, 100)}  # all text, then the images with the largest means
    overflow = plan.with_(text_overflow="keep_all")
    assert set(select(overflow, means, image, 10, deviations)) == set(range(40, 60))


# MEDA


def entropies(p):
    n_layers, n_heads, _, _ = p.q.shape
    group = n_heads // p.k.shape[1]
    q = p.q.astype(np.float16).astype(np.float64)  # as stored until the end of the prompt
    return np.array([
        np.mean([oracles.cross_entropy(q[i, h].tolist(), p.k[i, h // group].tolist(), p.image_mask.tolist())
                 for h in range(n_heads)]) for i in range(n_layers)
    ])  # fmt: skip


@pytest.mark.parametrize("layout", ["image_first", "image_last", "two_images", "scattered"])
def test_shares_follow_the_entropy_between_text_and_images(layout):
    p = prompt(30, (4, 2), layers=3, size=8, layout=layout)
    p.q[0] *= 0.1  # attends evenly
    p.q[2] *= 2
    e = entropies(p)
    assert e[0] > e[1] > e[2]
    share = np.exp(e) / np.exp(e).sum() * 24
    counts = member("allocator", "entropy").allocate(prompt_of(p, 8), {"attention": "cross"})
    assert counts.shape == (3, 2) and (counts[:, 0] == counts[:, 1]).all() and counts[:, 0].sum() == 24
    assert (np.abs(counts[:, 0] - share) < 1).all()


def test_shares_stay_between_one_percent_and_all():
    np.testing.assert_allclose(layer_shares(np.zeros(4), 0.2), [0.2] * 4)
    np.testing.assert_allclose(layer_shares(np.array([0, 9.0]), 0.2), [0.01, 0.4 / (1 + math.exp(-9))])
    np.testing.assert_allclose(layer_shares(np.array([9.0, 0, 0, 0]), 0.5), [1, 0.01, 0.01, 0.01])
    p = prompt(100, layers=3, layout="image_first")
    p.q[1:] *= 30
    p.q[0] = 0
    allocate = member("allocator", "entropy").allocate
    counts = allocate(prompt_of(p, 50), {"attention": "cross"})[:, 0].tolist()
    assert counts[0] == 100 and sum(counts) == 150
    assert min(allocate(prompt_of(p, 20, recent=12, fixed_recent=12), {"attention": "cross"})[:, 0]) == 12


def test_order_does_not_matter_between_text_and_images():
    """Nothing is masked: an image after the text counts as an image before it."""
    p, e = prompt(40, layers=1, layout="image_first"), []
    for order in (np.arange(40), np.arange(40)[::-1].copy()):
        moved = type(p)(p.q[:, :, order], p.k[:, :, order], p.v[:, :, order], p.image_mask[order])
        e.append(entropies(moved)[0])
    assert e[0] == pytest.approx(e[1])


@pytest.mark.parametrize("layout", ["text", "image"])
def test_a_prompt_of_one_kind_has_the_entropy_of_the_whole_map(layout):
    p = prompt(25, (2, 1), layers=3, size=8, layout=layout)
    p.q[1] = 0
    rows = [[row for q in p.q[i] for row in oracles.attention_rows(q.tolist(), p.k[i, 0].tolist())] for i in range(3)]
    of_map = [sum(-a * math.log(a) for row in layer for a in row) / len(layer) for layer in rows]
    share = np.exp(of_map) / np.exp(of_map).sum() * 18
    for attention in ("cross", "full"):
        counts = member("allocator", "entropy").allocate(prompt_of(p, 6), {"attention": attention})[:, 0]
        assert counts.sum() == 18 and (np.abs(counts - share) < 1).all()


def test_queries_beyond_half_precision_say_nothing(native):
    p = prompt(60, layers=3)
    p.q[1] *= 1e6
    result = assert_same(pykvedge.plan("meda", 0.2, scorer="knorm", reducer="evict"), p)
    assert [len(heads[0]) for heads in result.kept] == [12, 12, 12]


def test_meda_is_lookm_with_other_budgets():
    lookm, meda = pykvedge.plan("lookm"), pykvedge.plan("meda")
    assert (meda.scorer, meda.text_prior, meda.reducer, meda.allocator) == ("cumulative", True, "averaged", "entropy")
    assert meda.asked_recent(100, 20) == lookm.asked_recent(100, 20) == 10


# Released code


def test_official_roundings_can_miss_the_total():
    p = prompt(700, layers=6, size=8)
    plan = pykvedge.plan("pyramidkv", 0.1, **{"allocator.rounding": "official"})
    pyramid = [len(h[0]) for h in defined(plan, p).kept]
    base = 70 - 32
    step = (2 * base - 2 * (base // 20)) // 5
    assert pyramid == [2 * base - base // 20 - i * step + 32 for i in range(6)] and sum(pyramid) > 420
    one = prompt(200, layers=1)
    assert len(defined(plan.with_(budget=0.5), one).kept[0][0]) == 100

    scores = np.random.default_rng(4).random((3, 4, 60)) ** 3
    settings = {"floor": 0.3, "normalize": False, "budget_score": "attention"}
    given, allocate = Prompt(scores, np.zeros(60, dtype=bool), 15), member("allocator", "ada").allocate
    made = {rounding: allocate(given, {**settings, "rounding": rounding}) for rounding in ("exact", "official")}
    for i in range(3):
        best = sorted((-x, h) for h in range(4) for x in scores[i, h])[: 4 * 14]
        won = [sum(h == head for _, head in best) for h in range(4)]
        assert made["official"][i].tolist() == [round(w * 0.7 + int(14 * 0.3)) + 1 for w in won]
    assert (made["exact"].sum(axis=1) == 60).all()
    assert (made["official"].sum(axis=1) != 60).any()


def test_adaptive_budgets_go_by_attention_or_by_the_mixture():
    scores, attention = np.zeros((1, 2, 40)), np.zeros((1, 2, 40))
    scores[0, 0], attention[0, 1] = 1 + np.arange(40), 1 + np.arange(40)
    settings = {"floor": 0.0, "normalize": False, "rounding": "exact"}
    given = Prompt(scores, np.zeros(40, dtype=bool), 10, attention=attention)
    allocate = member("allocator", "ada").allocate
    assert allocate(given, {**settings, "budget_score": "mix"}).tolist() == [[19, 1]]
    assert allocate(given, {**settings, "budget_score": "attention"}).tolist() == [[1, 19]]
    p = prompt(120, layers=1)
    counts = {
        score: [len(h) for h in defined(pykvedge.plan("mixkv-ada", 60, **{"allocator.budget_score": score}), p).kept[0]]
        for score in ("attention", "mix")
    }
    by_attention = defined(pykvedge.plan("mixkv-ada", 60, scorer="window"), p)
    assert counts["attention"] == [len(h) for h in by_attention.kept[0]] != counts["mix"]


def test_the_filter_merges_what_is_at_least_as_similar_as_the_mean():
    p = prompt(40, layers=1, size=8)
    plan = pykvedge.plan("lookm", 0.4, reducer="weighted", **{"reducer.sim_filter": True})
    result = defined(plan, p)
    for h in range(2):
        k, v, kept = p.k[0, h].tolist(), p.v[0, h].tolist(), result.kept[0][h].tolist()
        best = {
            i: max(np.dot(k[i], k[j]) / np.linalg.norm(k[i]) / np.linalg.norm(k[j]) for j in kept)
            for i in range(40) if i not in kept
        }  # fmt: skip
        stays = [i for i in range(40) if i in kept or best[i] >= np.mean(list(best.values()))]
        assert len(kept) < len(stays) < 40
        left = [[rows[i] for i in stays] for rows in (k, v)]
        merged_k, merged_v = oracles.merge(*left, [stays.index(j) for j in kept], "weighted")
        np.testing.assert_allclose(result.k[0][h], merged_k, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.v[0][h], merged_v, rtol=1e-5, atol=1e-6)


# In the running model


class Context(TinyContext):
    """A tiny model with ubatches of a given size. Prompts are compressed explicitly."""

    def __init__(self, model, plan, n_ubatch):
        self.n_ubatch = n_ubatch
        super().__init__(model, plan, "f32", n_ctx=2048)
        self.cache.set_auto_compress(False)

    def _adjust(self, params):
        params.n_ubatch = self.n_ubatch

    def read(self, n, image, seed):
        """Reads n random tokens, or n random embeddings."""
        rng, at = np.random.default_rng(seed), self.n[0]
        rows = rng.standard_normal((n, self.llama.llama_model_n_embd_inp(self.model)))
        assert send(self.context, range(at, at + n), rng.integers(5, 1000, n), rows if image else None) == 0
        self.n[0] += n


@pytest.mark.parametrize("method", ["roco", "meda"])
def test_a_prompt_in_pieces_is_judged_as_a_whole(native, tiny, method):
    held = []
    for n_ubatch in (512, 48, 7):
        with Context(tiny("llama").model, pykvedge.plan(method, 0.3, reducer="evict"), n_ubatch) as context:
            for turn in range(2):
                for i, (n, image) in enumerate([(20, False), (90, True), (1, False), (60, True), (25, False)]):
                    context.read(n, image, [turn, i])
                assert context.cache.stats().score_bytes > 0
                context.cache.compress()
                assert context.cache.stats().score_bytes == 0
            held.append(context.held())
    lengths = [[len(heads[0]) for heads in layers] for layers in held]
    assert sum(lengths[0]) == 2 * 58 * len(lengths[0])
    for other in held[1:]:
        for mine, theirs in zip(held[0], other, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert len(a) == len(b) and len(set(a) & set(b)) >= len(a) - 2  # ubatches round differently


def test_queries_are_kept_only_where_an_allocator_asks_for_them(native, tiny):
    bytes_of = {}
    for method in ("h2o", "roco", "meda"):
        with Context(tiny("llama").model, pykvedge.plan(method, 0.3), 512) as context:
            context.read(300, True, 1)
            stats = context.cache.stats()
            bytes_of[method] = stats.score_bytes
            if method == "meda":
                assert 0.2 * stats.bytes < stats.score_bytes < 1.5 * stats.bytes and stats.peak_bytes > stats.bytes
    assert bytes_of["h2o"] < bytes_of["roco"] < 2.5 * bytes_of["h2o"] < bytes_of["meda"]
