"""Attention Matching: the definition against loops and optima, the kernel against both, queries in the model."""

import math
import struct

import numpy as np
import oracles_match as oracle
import pytest
from arrays import HEADS, outputs, prompt
from choosing import crossed
from contexts import TinyContext, random_tokens
from eval_runs import divergences

import pykvedge
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.tasks import demo_samples
from pykvedge import Head, UsageError
from pykvedge.library import libkvedge
from pykvedge.library.native_plan import check_stream, why_not_bounded
from pykvedge.reference.checks import rules
from pykvedge.reference.stages.reducer import match

DEFAULTS = {"bias": "row", "mass": "relative", "ridge": 0.3, "queries": 1}
WAYS = [("row", "absolute"), ("row", "relative"), ("head", "absolute"), ("none", "absolute")]


def plan_of(budget=0.2, reducer="match", **settings):
    named = {f"reducer.{name}": settings.pop(name) for name in list(settings) if name in DEFAULTS}
    return pykvedge.plan("h2o", budget, reducer=reducer, **named, **settings)


def clustered(seed, n_tokens, heads=(2, 1), size=32, layers=1):
    """Returns (q, k, v) of tokens in clusters, with queries for clusters, and queries of future tokens."""
    rng, (n_heads, n_heads_kv) = np.random.default_rng(seed), heads
    centres, values = rng.standard_normal((2, 10, size))
    kind = rng.integers(0, 10, (layers, n_heads_kv, n_tokens))
    k = centres[kind] + 0.6 * rng.standard_normal((*kind.shape, size))
    v = values[kind] + 0.5 * rng.standard_normal((*kind.shape, size))

    def queries(*shape):
        return 1.2 * (centres[rng.integers(0, 10, shape)] + rng.standard_normal((*shape, size)))

    q = queries(layers, n_heads, n_tokens)
    return tuple(np.ascontiguousarray(x, np.float32) for x in (q, k, v)), queries(100)


def halves(q, scale):
    """Returns queries in half precision, as they are kept, as lists."""
    return [[struct.unpack("e", struct.pack("e", float(np.float32(x) * scale)))[0] for x in row] for row in q.tolist()]


# ------------------------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("bias", "mass"), WAYS)
def test_the_definition_in_loops(bias, mass, biased):
    """16 rows, the last 3 protected; two query heads; with biases, as after an earlier merge."""
    for seed in range(2):
        (q, k, v), _ = clustered(seed, 16, size=4)
        kept, protected = np.array([1, 4, 6, 9, 11, 13, 14, 15]), np.arange(16) >= 13
        before = np.log(np.arange(16) % 3 + 1).astype(np.float32) if biased else None
        head = Head(k[0, 0], v[0, 0], kept, protected, bias=before, q=q[0])
        found = match.reduce(head, DEFAULTS | {"bias": bias, "mass": mass})
        values, logs = oracle.match(
            halves(q[0].reshape(-1, 4), 0.5), k[0, 0, :13].tolist(), v[0, 0, :13].tolist(), kept[:5].tolist(),
            DEFAULTS | {"bias": bias, "mass": mass}, None if before is None else before[:13].tolist(),
        )  # fmt: skip
        np.testing.assert_array_equal(found[0], k[0, 0, kept])
        np.testing.assert_array_equal(found[1][5:], v[0, 0, 13:])
        np.testing.assert_allclose(found[1][:5], values, rtol=1e-3, atol=1e-3)
        assert len(found) == (2 if bias == "none" else 3)
        if bias != "none":
            had = np.zeros(8) if before is None else before[kept]
            np.testing.assert_allclose(found[2] - had, [*logs, 0, 0, 0], atol=1e-3)


def test_rows_that_cannot_be_fitted_stay_as_they_were():
    (q, k, v), _ = clustered(0, 40, (1, 1))
    kept = np.arange(0, 40, 4)
    some = np.full((1, 40, 32), 1e6, np.float32)  # beyond the range of f16
    for queries in (None, q[0][:, :9], some):
        head = Head(k[0, 0], v[0, 0], kept, np.zeros(40, bool), q=queries)
        for ours, rows in zip(match.reduce(head, DEFAULTS), (k[0, 0], v[0, 0]), strict=False):
            np.testing.assert_array_equal(ours, rows[kept])
    for protected in (np.ones(40, bool), np.isin(np.arange(40), kept)):  # nothing to fit, or no rows to fit
        head = Head(k[0, 0], v[0, 0], kept, protected, q=q[0])
        np.testing.assert_array_equal(match.reduce(head, DEFAULTS)[1], v[0, 0][kept])


def projected_gradient(m, y, turns=20000):
    """Returns w in the box with the smallest |M w - y|, by accelerated projected gradients with restarts."""
    gram, right = m.T @ m, m.T @ y
    step, w = 1 / np.linalg.eigvalsh(gram)[-1], np.ones(m.shape[1])
    ahead, t = w, 1.0
    for _ in range(turns):
        new = np.clip(ahead - step * (gram @ ahead - right), *match.BOX)
        if (ahead - new) @ (new - w) > 0:
            ahead, t = w, 1.0
            continue
        if np.abs(new - w).max() < 1e-12:
            break
        after = (1 + math.sqrt(1 + 4 * t * t)) / 2
        ahead, w, t = new + (t - 1) / after * (new - w), new, after
    return float(np.linalg.norm(m @ w - y))


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("engine", rules.ENGINES)
def test_the_mass_is_within_a_hundredth_of_the_optimum(native, engine, relative):
    for heads, budget in (((1, 1), 30), ((4, 1), 70), ((1, 1), 70)):
        (q, k, v), _ = clustered(5, 150, heads)
        plan = plan_of(budget, recent=4, queries=64, mass="relative" if relative else "absolute")
        result = pykvedge.compress(plan, q, k, v, engine=engine, kv_type="f32")
        kept, bias = result.kept[0][0][:-4], result.bias[0][0]
        assert not bias[-4:].any()
        rows = np.array(halves(q[0].reshape(-1, 32), np.float32(1) / np.sqrt(np.float32(32))))
        logits = rows @ k[0, 0, :146].astype(np.float64).T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        y = weights.sum(axis=1)
        m, y = (weights[:, kept] / y[:, None], np.ones_like(y)) if relative else (weights[:, kept], y)
        found = np.linalg.norm(m @ np.exp(bias[:-4].astype(np.float64)) - y)
        assert found <= 1.01 * projected_gradient(m, y)
        assert found < 0.9 * np.linalg.norm(m.sum(axis=1) - y)


@pytest.mark.parametrize("engine", rules.ENGINES)
@pytest.mark.parametrize(("bias", "mass"), WAYS)
def test_later_queries_find_what_they_would_have_found(native, engine, bias, mass):
    """On unseen queries, at three budgets: on average less error than eviction, and small values."""
    errors = {"evict": [], "match": []}
    for heads, budget in (((2, 2), 0.2), ((4, 1), 0.2), ((4, 2), 0.5)):
        (q, k, v), later = clustered(7, 160, heads)
        for name, found in errors.items():
            settings = {"bias": bias, "mass": mass} if name == "match" else {}
            result = pykvedge.compress(plan_of(budget, name, recent=4, **settings), q, k, v, engine=engine)
            for h in range(heads[1]):
                full = outputs(later, k[0, h], v[0, h])
                ours = outputs(later, result.k[0][h], result.v[0][h], result.bias[0][h])
                found.append(np.linalg.norm(ours - full) / np.linalg.norm(full))
                assert np.abs(result.v[0][h]).max() <= 4 * np.abs(v[0, h]).max()
    assert np.mean(errors["match"]) < 0.9 * np.mean(errors["evict"])


# -------------------------------------------------------------------------------------------------- the library


@pytest.mark.parametrize(("way", "heads"), crossed(WAYS, HEADS, ["gqa"], [("row", "relative")]))
def test_the_library_agrees_with_the_definition(native, way, heads):
    for n_tokens, budget, kv_type in ((1, 0.2, "f16"), (5, 0.5, "f32"), (130, 0.2, "f16"), (130, 0.5, "f32")):
        plan = plan_of(budget, bias=way[0], mass=way[1])
        rules.engines_agree(plan, prompt(n_tokens, HEADS[heads]), kv_type)


@pytest.mark.parametrize("settings", [
    {"ridge": 0.01}, {"queries": 1}, {"recent": 0}, {"sinks": 3}, {"allocator": "ada", "scorer": "window"},
    {"recent": 100, "sinks": 40}, {"text_prior": True, "text_overflow": "keep_all"},
])  # fmt: skip
def test_settings(native, settings):
    rules.engines_agree(plan_of(0.3, **settings), prompt(160, (4, 2), size=40))


def test_more_queries_than_are_asked_for(native):
    """800 tokens of four heads are 3200 queries. The fit uses 4 for each row, or 512, evenly spread."""
    p = prompt(800, (4, 1), layers=1, size=16)
    for queries in (1, 4):
        rules.engines_agree(plan_of(0.2, queries=queries, recent=8), p)
    assert match.reference_queries(p.q[0], 512).shape == (512, 16)
    assert match.reference_queries(p.q[0][:1], 512).shape == (512, 16)
    assert match.reference_queries(p.q[0][:3], 512).shape == (513, 16)


def test_all_rows_of_a_head_have_one_bias(native):
    (q, k, v), _ = clustered(1, 120, (4, 2))
    result = pykvedge.compress(plan_of(0.3, bias="head", recent=6), q, k, v)
    for bias in result.bias[0]:
        assert len(np.unique(bias[:-6])) == 1 and bias[0] != 0 and not bias[-6:].any()


def test_what_cannot_be_matched_is_refused_in_one_line(native):
    with pytest.raises(UsageError, match="reducer 'match' needs all queries of a complete prompt"):
        check_stream(plan_of(64))
    assert "reducer 'match': the reducer needs all queries" in why_not_bounded(plan_of())


# ----------------------------------------------------------------------------------------------- the running model


def test_the_model_keeps_its_queries_until_the_prompt_is_compressed(native, tiny):
    with TinyContext(tiny("llama", weight="f32").model, plan_of(0.4)) as context:
        context.decode(random_tokens(300))
        stats, heads = context.cache.stats(), context.llama.llama_model_n_head(context.model)
        size = context.llama.llama_model_n_embd(context.model) // heads
        assert stats.score_bytes >= stats.n_layers * heads * 300 * 2 * size
        context.decode([7])
        stats = context.cache.stats()
        assert (stats.score_bytes, stats.n_unfitted) == (0, 0)
        biases = libkvedge.biases(context.cache, 0, 0)
        assert len(biases) == context.cache.lengths()[0][0] and biases.any() and np.abs(biases).max() <= 3.01


def test_a_prompt_that_was_read_under_another_plan_is_evicted(native, tiny):
    """The queries were not kept, so the prompt is evicted, and this is reported. The next prompt is matched again."""
    kept = {}
    for reducer in ("evict", "match"):
        with TinyContext(tiny("llama", weight="f32").model, plan_of(0.4, "evict")) as context:
            context.decode(random_tokens(200))
            context.cache.set_plan(plan_of(0.4, reducer))
            context.decode([7])
            stats, heads = context.cache.stats(), sum(len(layer) for layer in context.cache.lengths())
            assert stats.n_unfitted == (heads if reducer == "match" else 0)
            kept[reducer] = [libkvedge.rows(context.cache, 0, 0)[i] for i in range(2)]
            context.decode(random_tokens(200, seed=3))
            context.decode([9])
            assert context.cache.stats().n_unfitted == 0
    for ours, evicted in zip(kept["match"], kept["evict"], strict=True):
        np.testing.assert_array_equal(ours, evicted)


def test_the_demo_model_stays_as_near_to_its_full_cache_as_with_what_evict_leaves(native):
    plans = {
        "evict": {},
        "match": {},
        "unbound": {"reducer": "match", "reducer.ridge": 1e-5, "reducer.mass": "absolute"},
    }
    cells = [
        Cell(name, pykvedge.plan("snapkv", 0.2, **{"reducer": name, **settings})) for name, settings in plans.items()
    ]
    samples = [*demo_samples("where", 6, 0, 4), *demo_samples("code", 6, 0, 4)]
    divergence = divergences(samples, cells)
    assert divergence["match"] < 1.1 * divergence["evict"] and divergence["match"] < divergence["unbound"]
