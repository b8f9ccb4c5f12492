"""Reducer nearest: its groups against loops, rows that are not near, and its gain for later queries."""

import math
from itertools import chain

import numpy as np
import oracles
import pytest
from arrays import Prompt, outputs, prompt
from eval_runs import run

import pykvedge
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.tasks import demo_samples
from pykvedge import Head, UsageError
from pykvedge.plans.registry import member
from pykvedge.reference.checks import rules


def in_clusters(seed, n_tokens, heads=2, layers=2, size=16, spread=0.4):
    """Returns a prompt with keys and values in clusters of unequal length, with as many query heads as KV heads."""
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((2, 7, size)) * rng.uniform(0.3, 3.0, (7, 1))
    which = rng.integers(0, 7, (layers, heads, n_tokens))
    noise = rng.standard_normal((3, layers, heads, n_tokens, size))
    k, v = ((points[i][which] + spread * noise[i]).astype(np.float32) for i in range(2))
    return Prompt(noise[2].astype(np.float32), k, v, np.arange(n_tokens) % 3 > 0)


@pytest.mark.parametrize("reach", [0.5, 0.8, 1.5])
def test_who_joins_whom_in_loops(reach):
    merged = 0
    for seed in range(6):
        p = in_clusters(seed, 40, 1, 1)
        k, v = p.k[0, 0], p.v[0, 0]
        k[seed] = k[seed + 20]  # two equal keys
        kept = np.sort(np.random.default_rng(seed).choice(40, 11, replace=False)).astype(np.int32)
        mass = np.random.default_rng(seed).integers(1, 4, 40)
        head = Head(k, v, kept, np.zeros(40, bool), bias=np.log(mass).astype(np.float32))
        groups = oracles.nearest_within(k.tolist(), kept.tolist(), reach)
        merged += len([*chain(*groups.values())])
        found = member("reducer", "nearest").reduce(head, {"reach": reach, "bias": "mass"})
        for ours, rows in zip(found, (k, v), strict=False):
            expected = oracles.merge_copies(rows.tolist(), groups, mass.tolist(), "averaged")
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
        stands_for = [mass[j] + sum(mass[i] for i, _ in groups[j]) for j in kept]
        np.testing.assert_allclose(found[2], np.log(stands_for), rtol=1e-5, atol=1e-6)
    assert merged > 20 and (reach > 1 or merged < 6 * 29)  # some of 29 each, but not all


@pytest.mark.parametrize("scorer", ["modal", "cumulative", "position"])
@pytest.mark.parametrize("reach", [0.05, 0.4, 0.8, 2.0])
def test_the_library_agrees_with_the_definition(native, scorer, reach):
    for seed, (n_tokens, heads) in enumerate([(1, 1), (3, 2), (50, 1), (333, 2)]):
        plan = pykvedge.plan("h2o", 0.3, scorer=scorer, reducer="nearest", **{"reducer.reach": reach})
        for kv_type in ("f16", "f32"):
            rules.engines_agree(plan, in_clusters(seed, n_tokens, heads), kv_type)


def test_what_has_nothing_near_is_dropped(native):
    """Orthogonal keys are farther apart than their length, so the result equals that of evict."""
    k = np.zeros((1, 1, 32, 32), np.float32)
    k[0, 0] = 3 * np.eye(32)
    p = prompt(32, (1, 1), layers=1, size=32)
    plans = [pykvedge.plan("h2o", 0.25, reducer=reducer) for reducer in ("nearest", "evict")]
    ours, evicted = (pykvedge.compress(plan, p.q, k, p.v, p.image_mask, kv_type="f32") for plan in plans)
    np.testing.assert_array_equal(ours.k[0][0], evicted.k[0][0])
    np.testing.assert_array_equal(ours.v[0][0], evicted.v[0][0])
    assert not ours.bias[0][0].any()
    wider = pykvedge.plan("h2o", 0.25, reducer="nearest", **{"reducer.reach": 1.5})
    assert pykvedge.compress(wider, p.q, k, p.v, p.image_mask, kv_type="f32").bias[0][0].any()


def test_reach_is_a_length(native):
    for value in (0, -1, 11, math.nan, "far"):
        with pytest.raises(UsageError, match=r"reducer\.reach"):
            pykvedge.plan("h2o", reducer="nearest", **{"reducer.reach": value})


def test_later_queries_get_more_of_what_there_was(native):
    """Half of the tokens have unique keys; queries look at kept tokens: nearer than evict and LOOK-M's merge."""
    errors = {"evict": [], "averaged": [], "nearest": []}
    for seed in range(4):
        p = in_clusters(seed, 200, 4)
        p.k[:, :, ::2] = 2 * np.random.default_rng(seed).standard_normal(p.k[:, :, ::2].shape)
        for reducer, found in errors.items():
            settings = {"reducer.bias": "mass"} if reducer == "averaged" else {}
            plan = pykvedge.plan("h2o", 0.3, reducer=reducer, **settings)
            result = pykvedge.compress(plan, *p.arguments, kv_type="f32")
            for i, h in np.ndindex(2, 4):
                later = p.k[i, h][result.kept[i][h]].astype(np.float64)[::3] / 3
                full = outputs(later, p.k[i, h].astype(np.float64), p.v[i, h].astype(np.float64))
                ours = outputs(later, result.k[i][h], result.v[i][h], result.bias[i][h])
                found.append(np.linalg.norm(ours - full) / np.linalg.norm(full))
    means = {reducer: np.mean(found) for reducer, found in errors.items()}
    assert means["nearest"] < 0.9 * min(means["averaged"], means["evict"]), means


def test_the_demo_model_diverges_less_than_with_evict(native):
    """With the default method's budgets, where half of all pairs stay."""
    cells = [Cell(reducer, pykvedge.plan("kvedge", 0.5, reducer=reducer)) for reducer in ("nearest", "evict")]
    samples = [*demo_samples("where", 4, 0, 4), *demo_samples("code", 4, 0, 4)]
    rows = run(samples, cells, answers=False)
    found = {
        cell.name: [row["kld"] / row["tokens"] for key, row in rows.items() if key[1] == cell.name] for cell in cells
    }
    assert np.mean(found["nearest"]) < 0.7 * np.mean(found["evict"])
