"""The window of last tokens in SnapKV's family: whole at the papers' budgets, shorter at smaller budgets."""

import numpy as np
import oracles
import pytest
from arrays import profiles_of, projection_of, prompt
from choosing import crossed
from test_parity import assert_same

import pykvedge
from pykvedge.plans.registry import members

# a head's share includes its window, and can be smaller than the window
UNEVEN = ("calibrated",)
FAMILY = [m for m in pykvedge.methods() if m not in UNEVEN and pykvedge.plan(m).scorer in ("window", "mixkv")]
SCORERS = {
    "window": {"scorer": "window"},
    "mixkv": {"scorer": "mixkv"},
    "mixkv, 3 parts": {"scorer": "mixkv", "scorer.parts": 3},
    "cumulative": {"scorer": "cumulative", "scorer.window": 32},
}
SMALL = (1, 2, 3, 16, 31, 33, 40, 63)


def window_of(plan):
    return plan.settings("scorer")["window"]


def compress(plan, p, engine):
    given = {"profile": profiles_of(plan, p), "projection": projection_of(plan, p)}
    return pykvedge.compress(plan, *p.arguments, engine=engine, **given)


def test_the_family_is_all_there():
    assert {"snapkv", "pyramidkv", "adakv", "sparsemm", "headkv", "mixkv", "mixkv-headkv", "criticalkv"} <= set(FAMILY)
    assert len(FAMILY) == 12


@pytest.mark.parametrize("engine", ["numpy", "native"])
@pytest.mark.parametrize("name", FAMILY)
def test_from_two_windows_on_the_whole_window_is_kept_as_in_the_papers(native, name, engine):
    """Equal bit for bit to a plan with the window as `recent`, which no budget shortens."""
    p = prompt(300, layers=4)
    window = window_of(pykvedge.plan(name))
    for budget in (2 * window, 2 * window + 1, 100, 0.5):
        plan = pykvedge.plan(name, budget)
        found, asked = (compress(x, p, engine) for x in (plan, plan.with_(recent=window)))
        for i, h in np.ndindex(p.k.shape[:2]):
            assert set(range(300 - window, 300)) <= set(found.kept[i][h].tolist())
            for ours, theirs in ((found.kept, asked.kept), (found.k, asked.k), (found.v, asked.v)):
                np.testing.assert_array_equal(ours[i][h], theirs[i][h])


@pytest.mark.parametrize(
    ("scorer", "allocator"), crossed(SCORERS, members("allocator"), ["uniform", "ada"], ["window"])
)
def test_below_two_windows_the_window_gives_way(native, scorer, allocator):
    p, settings = prompt(170, (4, 2), layers=3), SCORERS[scorer]
    for budget in SMALL:
        found = assert_same(pykvedge.plan("h2o", budget, allocator=allocator, **settings), p)
        for i, h in np.ndindex(p.k.shape[:2]):
            kept = found.kept[i][h].tolist()
            recent = oracles.protected_window(32, len(kept), budget, settings.get("scorer.parts", 2))
            assert kept == oracles.heavy_hitters(found.scores[i, h].tolist(), len(kept), recent)


@pytest.mark.parametrize("name", ["snapkv", "mixkv"])
def test_what_the_window_looks_at_is_kept_at_every_budget(name):
    p = prompt(170, (2, 2), layers=1)
    p.q[0, :, -32:] = 1 + 0.1 * p.q[0, :, -32:]
    p.k[0, :, 50] = 2  # a key that the last queries attend to
    for budget in (4, 16, 30, 32, 34, 64):
        plan = pykvedge.plan(name, budget, **{"scorer.kernel": 1})  # no pooling, which would tie neighbours
        assert all(50 in kept for kept in compress(plan, p, "numpy").kept[0]), budget


def test_heads_with_less_than_the_window_choose_too(native):
    """An allocator can give some layers fewer pairs than the window."""
    p = prompt(170, (2, 2), layers=4)
    p.q[0] *= 0.01  # the first layer attends most widely
    p.q[1:] *= 2
    plan = pykvedge.plan("snapkv", 34, allocator="entropy", **{"allocator.attention": "full"})
    found = assert_same(plan, p)
    few = [(i, h) for i, h in np.ndindex(4, 2) if 3 < len(found.kept[i][h]) < 17]  # 17: half of the even share
    assert few
    for i, h in few:
        kept = found.kept[i][h].tolist()
        assert kept == oracles.heavy_hitters(found.scores[i, h].tolist(), len(kept), len(kept) // 2)
        assert kept[0] < 170 - 32  # from before the window
