"""Allocator global against plain loops: one ranking over all layers and heads."""

import math

import numpy as np
import pytest
from arrays import prompt

import pykvedge
from pykvedge.plans.registry import member
from pykvedge.reference.stages.base import Prompt


def by_hand(scores, budget, recent, floor):
    """Returns counts [L][H] by KVzip's rule with a floor."""
    held = max(recent, 1)
    own = math.floor(floor * (budget - held) + 1e-9)
    counts, rest = {}, []
    for layer, heads in enumerate(scores):
        for head, row in enumerate(heads):
            best = sorted(range(len(row) - recent), key=lambda t, row=row: (-row[t], t))
            counts[layer, head] = held + own
            rest += [(-row[t], layer, head, t) for t in best[own : len(row) - held]]
    left = len(counts) * (budget - held - own)
    for _, layer, head, _ in sorted(rest)[:left]:
        counts[layer, head] += 1
    return [[counts[layer, head] for head in range(len(heads))] for layer, heads in enumerate(scores)]


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize(
    ("n_tokens", "budget", "recent"), [(2, 1, 0), (9, 4, 1), (40, 8, 3), (40, 39, 0), (40, 8, 8), (60, 30, 16)]
)
def test_counts_are_those_of_one_ranking(n_tokens, budget, recent, floor):
    rng = np.random.default_rng(n_tokens + budget)
    scores = np.round(rng.gamma(0.5, size=(3, 4, n_tokens)), 1)  # with ties
    scores[1] *= 5
    given = Prompt(scores, np.zeros(n_tokens, dtype=bool), budget, recent)
    made = member("allocator", "global").allocate(given, {"floor": floor})
    assert made.tolist() == by_hand(scores.tolist(), budget, recent, floor)
    assert made.sum() == made.size * budget and made.min() >= max(recent, 1) and made.max() <= n_tokens


def test_scores_that_are_all_equal_are_shared_out_evenly():
    for value in (0.0, 0.25):
        given = Prompt(np.full((2, 3, 30), value), np.zeros(30, dtype=bool), 7, 2)
        assert (member("allocator", "global").allocate(given, {"floor": 0.0}) == 7).all()


def test_a_layer_that_is_looked_at_more_keeps_more():
    p = prompt(80, layers=2)
    p.q[1] *= 8  # sharp attention: its largest scores are larger
    given = {"scorer.kernel": 1, "scorer.window": 8, "allocator.floor": 0.0}
    for engine in ("native", "numpy"):
        made = pykvedge.compress(pykvedge.plan("snapkv", 20, allocator="global", **given), p.q, p.k, p.v, engine=engine)
        lengths = np.array([[len(head) for head in layer] for layer in made.kept])
        assert lengths.sum() == 20 * lengths.size and lengths[0].mean() != lengths[1].mean()
