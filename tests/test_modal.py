"""Scorer modal: its definition against loops, and its purpose."""

import itertools

import numpy as np
import oracles_modal
import pytest
from arrays import LAYOUTS, layer_of, prompt
from test_parity import assert_same

import pykvedge
from pykvedge.plans.registry import member

SETTINGS = {"window": 8, "fade": 0.15, "kernel": 5, "parts": 3, "outlier": 1.0, "gamma": 0.25, "text": 4}
IMAGES = {"text": [], "image": range(1, 41), "image_last": range(12, 60), "two": [*range(2, 20), *range(26, 45)]}


def mask(n_tokens, tokens):
    out = np.zeros(n_tokens, dtype=bool)
    out[list(tokens)] = True
    return out


CHANGED = [
    {"window": 1}, {"window": 20}, {"window": 100}, {"fade": 0.0}, {"fade": 3.0}, {"kernel": 1}, {"kernel": 9},
    {"parts": 2}, {"parts": 7}, {"outlier": 0.0}, {"outlier": 5.0}, {"gamma": 0.0}, {"gamma": 0.6}, {"gamma": 1.0},
    {"text": 2}, {"text": 9},
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "changed"),
    [*((layout, {}) for layout in LAYOUTS), *itertools.product(("text", "two_images"), CHANGED)],
    ids=str,
)
@pytest.mark.parametrize("n_tokens", [2, 9, 31])
def test_scores_are_those_of_loops(n_tokens, layout, changed):
    p, settings = prompt(n_tokens, (4, 2), size=8, layout=layout), {**SETTINGS, **changed}
    scores = member("scorer", "modal").score(layer_of(p), settings)
    for h in range(2):
        expected = oracles_modal.modal(
            p.q[0, 2 * h : 2 * h + 2].tolist(), p.k[0, h].tolist(), p.v[0, h].tolist(), p.image_mask.tolist(), settings
        )
        np.testing.assert_allclose(scores[h], expected, rtol=1e-7, atol=1e-12)


def test_a_token_has_no_vote_for_itself():
    """The votes for a token come only from later queries, not from the token's query."""
    p = prompt(30, (2, 2), layers=1, size=8)
    votes = member("scorer", "modal").attention(layer_of(p), SETTINGS)
    assert not votes[:, -1].any()  # no query follows the last token
    p.k[0, :, 25] = 9 * p.q[0, :, 25] / np.linalg.norm(p.q[0, :, 25], axis=1, keepdims=True)
    louder = member("scorer", "modal").attention(layer_of(p), SETTINGS)
    paid = [oracles_modal.votes(p.q[0, h].tolist(), p.k[0, h].tolist(), 8, 0.15) for h in range(2)]
    np.testing.assert_allclose(louder, paid, rtol=1e-9)
    assert (louder[:, 25] < 0.9).all()


def test_images_do_not_compete_with_the_scale_of_text():
    """The ranking of image tokens does not depend on the norms of the text's values."""
    p = prompt(60, (2, 2), layers=1)
    p = type(p)(p.q, p.k, p.v, mask(60, range(4, 52)))
    first = member("scorer", "modal").score(layer_of(p), SETTINGS)
    p.v[:, :, 52:] *= 100  # an outlier of the text would squeeze the range of others
    second = member("scorer", "modal").score(layer_of(p), SETTINGS)
    np.testing.assert_array_equal(first[:, 4:52], second[:, 4:52])


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_a_patch_unlike_its_neighbours_gains(weight):
    """The patch gains most, and all gains sum to weight times the other scores. Text gains nothing."""
    p = prompt(60, (2, 2), layers=1)
    for x in (p.k, p.v):
        x[0, :, 20:40] = x[0, :, 20:21]
    p.k[0, :, 30] *= -1
    scorer, settings = member("scorer", "modal"), {**SETTINGS, "text": 64}  # no raised rank among images

    def gained(tokens):
        layer = layer_of(type(p)(p.q, p.k, p.v, mask(60, tokens)))
        without = scorer.score(layer, {**settings, "outlier": 0.0})
        return scorer.score(layer, {**settings, "outlier": weight}) - without, without[:, tokens].sum(axis=1)

    image = range(20, 40)
    of_image, mixed = gained(image)
    assert (of_image.argmax(axis=1) == 30).all()
    np.testing.assert_allclose(of_image[:, image].sum(axis=1), weight * mixed, rtol=1e-6)
    assert not of_image[:, :20].any()
    assert not gained([])[0].any()


@pytest.mark.parametrize("allocator", ["uniform", "calibrated", "global"])
@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("layout", IMAGES)
def test_one_in_parts_is_the_end_of_the_text(native, layout, parts, allocator):
    """Every head keeps 1 / `parts` of its pairs from the end of the text, after the last image, within the window."""
    p = prompt(60, (4, 2), layers=2)
    p = type(p)(p.q, p.k, p.v, mask(60, IMAGES[layout]))
    text = 60 - 1 - max(IMAGES[layout], default=-1)
    settings = {"scorer": "modal", "scorer.parts": parts, "scorer.window": 12, "allocator": allocator, "recent": 0}
    for budget in (4, 9, 20, 30):
        plan = pykvedge.plan("h2o", budget, **settings)
        for kept in (head for layer in assert_same(plan, p).kept for head in layer):
            end = min(len(kept) // parts, text, 12)
            assert set(range(60 - end, 60)) <= set(kept.tolist())


@pytest.mark.parametrize("allocator", ["uniform", "calibrated", "global"])
@pytest.mark.parametrize("text", [2, 4, 9])
def test_one_in_so_many_is_text_between_images(native, text, allocator):
    """Every head keeps 1 / `text` of its pairs from the last text tokens, even if no query attends to them."""
    p = prompt(120, (4, 2), layers=2)
    between = [0, 1, 30, 31, 60, 61, 62, 90, 91, 118, 119]
    p = type(p)(p.q, p.k, p.v, mask(120, [t for t in range(120) if t not in between]))
    p.k[:, :, between] = -2 * p.q[:, :2, -1:]
    settings = {"scorer": "modal", "scorer.text": text, "scorer.parts": 64, "allocator": allocator, "recent": 0}
    for budget in (9, 36, 70):
        plan = pykvedge.plan("h2o", budget, **settings)
        for kept in (head for layer in assert_same(plan, p).kept for head in layer):
            last = min(len(kept) // text, len(between))
            assert set(between[len(between) - last :]) <= set(kept.tolist())


def test_the_default_plan_is_made_of_it():
    plan = pykvedge.default_plan()
    assert (plan.scorer, plan.allocator, plan.sinks, plan.recent) == ("modal", "calibrated", 1, None)


def test_the_more_the_default_method_keeps_the_more_it_merges_and_the_more_of_it_is_text():
    def reach(budget, **settings):
        return pykvedge.plan("kvedge", budget, **settings).settings("reducer").get("reach")

    assert [reach(b) for b in (None, "0.5", 0.7, 1.0)] == [1.2] * 4
    assert [reach(b) for b in (0.49, 0.1, 400)] == [0.8] * 3
    assert [pykvedge.plan("kvedge", b).settings("scorer")["text"] for b in (0.5, 0.2, 0.1, 64)] == [4, 8, 16, 16]
    assert pykvedge.plan("kvedge", 0.5, scorer="window").settings("scorer").get("text") is None
    assert reach(0.5, **{"reducer.reach": 0.9}) == 0.9
    assert reach(0.5, reducer="evict") is None
