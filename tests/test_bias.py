"""Biases of merged rows with reducer.bias = mass: against loops, in streams, in the running model, and their gain."""

import numpy as np
import oracles
import pytest
from arrays import HEADS, outputs, prompt
from contexts import TinyContext, random_tokens
from eval_runs import divergences

import pykvedge
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.tasks import demo_samples
from pykvedge import Head, UnknownNameError, UsageError
from pykvedge.library import libkvedge
from pykvedge.plans.registry import member, members
from pykvedge.reference.checks import rules

MERGING = [name for name in members("reducer") if any("mass" in p.choices for p in member("reducer", name).params)]
BY_KEY = {"averaged": "averaged", "pivotal": "pivotal", "weighted": "weighted"}
MASS = {"reducer.bias": "mass"}


def plan_of(reducer, budget=0.2, bias="mass", **settings):
    """Returns a plan. With reducer nearest, the reach is so large that every row is merged (else: test_nearest.py)."""
    near = {"reducer.reach": 10} if reducer == "nearest" else {}
    return pykvedge.plan("h2o", budget, reducer=reducer, **{"reducer.bias": bias}, **near, **settings)


def test_every_reducer_that_merges_has_the_setting(native):
    assert set(members("reducer")) - set(MERGING) == {"evict", "match"}
    assert {"averaged", "pivotal", "weighted", "bucket", "position"} <= set(MERGING)


def test_what_it_may_be(native):
    with pytest.raises(UsageError, match="none, mass"):
        pykvedge.plan("lookm", **{"reducer.bias": "max"})
    with pytest.raises(UnknownNameError, match="reducer 'evict' has no setting 'bias'"):
        pykvedge.plan("h2o", **MASS)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("reducer", MERGING)
def test_the_library_agrees_with_the_definition(native, reducer, heads):
    for n_tokens in (1, 5, 130):
        for kv_type in ("f16", "f32"):
            ours = rules.engines_agree(plan_of(reducer), prompt(n_tokens, HEADS[heads]), kv_type)
        without, p = plan_of(reducer, bias="none"), prompt(n_tokens, HEADS[heads])
        plain = pykvedge.compress(without, *p.arguments, kv_type="f32")
        for h in range(HEADS[heads][1]):  # rows that stand for one each: published values, and a bias
            np.testing.assert_array_equal(ours.k[0][h], plain.k[0][h])
            np.testing.assert_array_equal(ours.v[0][h], plain.v[0][h])
            assert not plain.bias[0][h].any()
            assert ours.bias[0][h].any() or n_tokens == 1 or reducer == "bucket"


@pytest.mark.parametrize("reducer", MERGING)
def test_rows_stand_for_all_that_there_were(native, reducer):
    """With every reducer, the sum of e^bias over all rows is the number of tokens that were not dropped."""
    p, settings = prompt(180), {"reducer.into_protected": True} if reducer == "bucket" else {}
    result = pykvedge.compress(plan_of(reducer, **settings), *p.arguments)
    for layer in result.bias:
        for bias in layer:
            assert float(np.exp(bias).sum()) == pytest.approx(180, rel=1e-5)


def head_with_masses(seed):
    """Returns a head of 24 rows that stand for 1 to 4 rows each, 8 kept; a kept and an evicted key have the norm 0."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, 24, 8)).astype(np.float32)
    kept = np.sort(rng.choice(24, 8, replace=False)).astype(np.int32)
    evicted = np.setdiff1d(np.arange(24), kept)
    k[kept[2]], k[evicted[5]] = 0, 0
    mass = rng.integers(1, 5, 24)
    protected = (np.arange(24) < 2) | (np.arange(24) >= 20)
    return Head(k, v, kept, protected, bias=np.log(mass).astype(np.float32)), mass.tolist()


@pytest.mark.parametrize("reducer", MERGING)
def test_rows_that_stand_for_several_in_loops(reducer):
    """A row with the bias ln m is m copies of the row, merged one after the other by the papers' equations."""
    for seed in range(4):
        head, mass = head_with_masses(seed)
        k, v, kept = head.k.tolist(), head.v.tolist(), head.kept.tolist()
        settings = {p.name: p.default for p in member("reducer", reducer).params} | {"bias": "mass"}
        if reducer in BY_KEY:
            groups, kind = oracles.nearest_by_key(k, kept), BY_KEY[reducer]
        elif reducer == "nearest":
            groups, kind = oracles.nearest_within(k, kept, settings["reach"]), "averaged"
        else:
            anchors = [j for j in kept if reducer == "position" or not head.protected[j]]
            groups, kind = oracles.nearest_by_place(len(k), kept, anchors), "averaged"
        found = member("reducer", reducer).reduce(head, settings)
        for ours, rows in zip(found, (k, v), strict=False):
            np.testing.assert_allclose(ours, oracles.merge_copies(rows, groups, mass, kind), rtol=1e-5, atol=1e-6)
        stands_for = [mass[j] + sum(mass[i] for i, _ in groups[j]) for j in kept]
        np.testing.assert_allclose(found[2], np.log(stands_for), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("reducer", "scorer"), [
    *((reducer, "cumulative") for reducer in MERGING),
    ("averaged", "window"), ("pivotal", "mixkv"), ("position", "expected"),
])  # fmt: skip
def test_streams_merge_again_what_was_merged(native, reducer, scorer):
    """The scores of both engines use the biases of the held rows; without biases, other tokens would stay."""
    p = prompt(160)
    settings = {"scorer.window": 8} if scorer in ("window", "mixkv") else {}
    plan = plan_of(reducer, 40, scorer=scorer, recent=4, **settings)
    ours, definition = (
        pykvedge.compress(plan, *p.arguments, engine=engine, kv_type="f32", stream=30) for engine in rules.ENGINES
    )
    for layer in range(2):
        for h in range(2):
            np.testing.assert_array_equal(ours.kept[layer][h], definition.kept[layer][h])
            for a, b in ((ours.k, definition.k), (ours.v, definition.v), (ours.bias, definition.bias)):
                np.testing.assert_allclose(a[layer][h], b[layer][h], rtol=4e-3, atol=4e-3)
            mass = float(np.exp(ours.bias[layer][h].astype(np.float64)).sum())
            assert mass <= 160 * (1 + 1e-5) and (reducer == "bucket" or mass == pytest.approx(160, rel=1e-4))


@pytest.mark.parametrize("engine", rules.ENGINES)
def test_equal_keys_lose_nothing(native, engine):
    """Rows with the same key share a softmax weight, so their mean with a bias replaces them exactly."""
    rng = np.random.default_rng(3)
    p = prompt(60, (1, 1), layers=1, size=16)
    directions = rng.standard_normal((6, 16)).astype(np.float32)
    p.k[0, 0] = directions[np.arange(60) % 6]
    result = pykvedge.compress(
        plan_of("averaged", 12, scorer="position", recent=6), *p.arguments, engine=engine, kv_type="f32"
    )
    q = rng.standard_normal((20, 16))
    full = outputs(q, p.k[0, 0].astype(np.float64), p.v[0, 0].astype(np.float64))
    k, v, bias = (x[0][0].astype(np.float64) for x in (result.k, result.v, result.bias))
    np.testing.assert_allclose(outputs(q, k, v, bias), full, rtol=1e-4, atol=1e-5)
    assert np.abs(outputs(q, k, v) - full).max() > 0.02


@pytest.mark.parametrize("reducer", ["averaged", "pivotal", "weighted"])
def test_outputs_of_later_queries_come_nearer_to_the_full_cache(native, reducer):
    """LOOK-M's kept set at 0.2, with tokens in clusters: on average over heads, the bias reduces the error."""
    errors = {"none": [], "mass": []}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        centres, cluster = rng.standard_normal((2, 12, 32)), rng.integers(0, 12, (2, 4, 176))
        noise = rng.standard_normal((3, *cluster.shape, 32))
        k, v = ((centres[i][cluster] + 0.5 * noise[i]).astype(np.float32) for i in range(2))
        q, mask, later = noise[2].astype(np.float32), np.arange(176) % 3 > 0, rng.standard_normal((40, 32))
        for bias, found in errors.items():
            plan = pykvedge.plan("lookm", 0.2, reducer=reducer, **{"reducer.bias": bias})
            result = pykvedge.compress(plan, q, k, v, mask, kv_type="f32")
            for i, h in np.ndindex(2, 4):
                full = outputs(later, k[i, h].astype(np.float64), v[i, h].astype(np.float64))
                ours = outputs(later, result.k[i][h], result.v[i][h], result.bias[i][h])
                found.append(np.linalg.norm(ours - full) / np.linalg.norm(full))
    assert np.mean(errors["mass"]) < 0.95 * np.mean(errors["none"])


def test_the_demo_model_diverges_less_from_its_full_cache(native):
    cells = [
        Cell(f"{reducer} {bias}", pykvedge.plan("lookm", 0.1, reducer=reducer, **{"reducer.bias": bias}))
        for reducer in ("averaged", "weighted", "position")
        for bias in ("none", "mass")
    ]
    samples = [*demo_samples("where", 4, 0, 4), *demo_samples("code", 4, 0, 4)]
    divergence = divergences(samples, cells)
    for reducer in ("averaged", "weighted", "position"):
        assert divergence[f"{reducer} mass"] < divergence[f"{reducer} none"]


# ----------------------------------------------------------------------------------------------- the running model


def by_token(context, layer, head, sequence=0):
    tokens = context.cache.tokens(layer, head, sequence)
    return dict(zip(tokens, libkvedge.biases(context.cache, layer, head, sequence).tolist(), strict=True))


def logits_without_bias(context, layer, head):
    """Returns how far the last token's log weights are from any q.k, per query head: minus biases, and with them."""
    k, _ = libkvedge.rows(context.cache, layer, head)
    rows = np.concatenate([k.astype(np.float64), np.ones((len(k), 1))], axis=1)
    group = context.llama.llama_model_n_head(context.model) // len(context.cache.lengths()[layer])
    bias = libkvedge.biases(context.cache, layer, head).astype(np.float64)
    found = []
    for g in range(group):
        seen = np.log(context.cache.attention(layer, head * group + g).astype(np.float64))
        for y in (seen - bias, seen):
            found.append(np.abs(rows @ np.linalg.lstsq(rows, y, rcond=None)[0] - y).max())
    return found[::2], found[1::2]


@pytest.mark.parametrize(("kv_type", "decode"), [
    ("f16", "keep-all"), ("f32", "sliding"), ("f16", "heavy-hitter"), ("q8_0", "sliding"), ("kivi4", "heavy-hitter"),
])  # fmt: skip
def test_answers_attend_with_biases(native, tiny, kv_type, decode):
    """The softmax weights of answer tokens are e^(q.k + b). Rows keep their bias; new rows have none."""
    plan = pykvedge.plan("h2o", 0.4, reducer="averaged", decode=decode, **MASS)
    with TinyContext(tiny("llama", weight="f32").model, plan, kv_type) as context:
        context.cache.watch(True)
        context.decode(random_tokens(300))
        before = context.cache.stats().bytes
        context.decode([7])
        given = [[by_token(context, i, h) for h in range(len(x))] for i, x in enumerate(context.cache.lengths())]
        assert all(np.exp([*head.values()]).sum() == pytest.approx(301, rel=1e-4) for layer in given for head in layer)
        assert context.cache.stats().bytes < before
        for token in random_tokens(40, seed=2):
            context.decode([token])
        for i, heads in enumerate(given):
            for h, head in enumerate(heads):
                now = by_token(context, i, h)
                assert all(bias == head.get(token, 0.0) for token, bias in now.items())
                assert (len(now) == len(head) + 40) == (decode == "keep-all")
                with_bias, without = logits_without_bias(context, i, h)
                assert max(with_bias) < 2e-3 < 0.1 < min(without)


def test_copies_have_biases_of_their_own(native, tiny):
    plan = pykvedge.plan("h2o", 0.4, reducer="averaged", **MASS)
    with TinyContext(tiny("llama", weight="f32").model, plan) as context:
        context.decode(random_tokens(200))
        context.decode([7])
        given = by_token(context, 0, 0)
        context.llama.llama_memory_seq_cp(context.memory, 0, 1, -1, -1)
        assert context.llama.llama_memory_seq_rm(context.memory, 0, 150, -1)
        assert by_token(context, 0, 0, 1) == given
        assert by_token(context, 0, 0) == {token: bias for token, bias in given.items() if token < 150}


def test_kv_bytes_include_biases(native, tiny):
    """The bias takes four bytes for each row of each head, and nothing without the setting."""
    held = {}
    for bias in ("none", "mass"):
        plan = pykvedge.plan("h2o", 0.4, reducer="averaged", **{"reducer.bias": bias})
        with TinyContext(tiny("llama", weight="f32").model, plan) as context:
            context.decode(random_tokens(300))
            context.decode([7])
            held[bias] = context.cache.stats().bytes
            rows = sum(n - 1 for layer in context.cache.lengths() for n in layer)
    assert held["mass"] - held["none"] == 4 * rows


@pytest.mark.parametrize("decode", ["keep-all", "sliding"])
def test_devices_add_biases_in_half_precision(native, tiny, decode):
    """ggml's graphs with f32 weights: near the host's logits, far from the logits without biases."""
    files, found = tiny("llama", weight="f32"), {}
    for device, bias in (("none", "mass"), ("CPU", "mass"), ("none", "none")):
        plan = pykvedge.plan("h2o", 0.2, reducer="averaged", decode=decode, **{"reducer.bias": bias})
        with pykvedge.Session(files.model, None, plan, threads=1, kv_type="f32", device=device) as session:
            session.ask("The quick brown fox jumps over the lazy dog. " * 6, [], pykvedge.Sampling(max_tokens=6)).read()
            assert (session.engine.cache.stats().device_bytes > 0) == (device == "CPU")
            found[device, bias] = session.engine.context.logits().copy()
    host = found["none", "mass"]
    assert np.abs(found["CPU", "mass"] - host).max() < 0.02 < 1 < np.abs(found["none", "none"] - host).max()
