"""Streams on arrays: libkvedge against the NumPy definition, and both against the papers' equations in loops."""

import numpy as np
import oracles
import pytest
from arrays import HEADS, LAYOUTS, prompt
from choosing import crossed

import pykvedge
from pykvedge.errors import KvedgeError, UnsupportedError, UsageError
from pykvedge.library.native_plan import check_stream, compress_arrays
from pykvedge.plans.registry import members


def can_stream(plan):
    try:
        check_stream(plan)
    except UsageError:
        return False
    return True


SCORERS = [n for n in members("scorer") if can_stream(pykvedge.plan("h2o", 200, scorer=n))] + ["dct"]
SETTINGS = {"window": {"scorer.window": 8}, "mixkv": {"scorer.window": 8}, "dct": {"scorer.share": "head"}}


def plan_of(scorer, bound, **settings):
    return pykvedge.plan("h2o", bound, scorer=scorer, **settings, **SETTINGS.get(scorer, {}))


def agree(plan, p, step, kv_type="f16"):
    ours = pykvedge.compress(plan, *p.arguments, engine="native", kv_type=kv_type, threads=2, stream=step)
    definition = pykvedge.compress(plan, *p.arguments, engine="numpy", kv_type=kv_type, stream=step)
    assert ours.scores.shape == definition.scores.shape == (*p.k.shape[:2], 0)
    for layer in range(len(p.k)):
        for h in range(p.k.shape[1]):
            np.testing.assert_array_equal(ours.kept[layer][h], definition.kept[layer][h], err_msg=f"{layer} {h}")
            for a, b in ((ours.k, definition.k), (ours.v, definition.v)):
                np.testing.assert_allclose(a[layer][h], b[layer][h], rtol=4e-3, atol=4e-3)
    return ours


@pytest.mark.parametrize(("scorer", "heads"), crossed(SCORERS, HEADS, ["gqa"], ["cumulative", "window"]))
def test_every_scorer(native, scorer, heads):
    for prior in (False, True):
        p = prompt(230, HEADS[heads])
        ours = agree(plan_of(scorer, 48, text_prior=prior), p, 32)
        assert all(len(kept) == 48 for layer in ours.kept for kept in layer)


@pytest.mark.parametrize(
    ("scorer", "step"),
    crossed(
        ["cumulative", "window", "expected", "keydiff", "knorm"], [1, 7, 64, 229, 230, 500], [1, 64], ["cumulative"],
    ),
)  # fmt: skip
def test_every_step(native, scorer, step):
    agree(plan_of(scorer, 40, sinks=2), prompt(230 if step > 1 else 70), step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_image_layout(native, layout):
    agree(plan_of("cumulative", 40, text_prior=True), prompt(150, layout=layout), 25)


@pytest.mark.parametrize("settings", [{"recent": 0}, {"recent": 20, "sinks": 4}, {"recent": 0.1}, {"sinks": 40}])
@pytest.mark.parametrize("scorer", ["position", "cumulative", "window"])
def test_every_protection(native, scorer, settings):
    ours = agree(plan_of(scorer, 40, **settings), prompt(200), 30)
    if "sinks" in settings and scorer == "position":
        n = min(settings["sinks"], 40)
        assert all(list(kept[:n]) == list(range(n)) for layer in ours.kept for kept in layer)


@pytest.mark.parametrize("reducer", sorted(set(members("reducer")) - {"match"}))  # match needs a complete prompt
def test_merged_rows_stay_near_the_definition(native, reducer):
    """Rows are rounded at every step, by the same rules; f32 keeps both engines close."""
    agree(plan_of("knorm" if reducer == "evict" else "position", 40, reducer=reducer, sinks=4), prompt(160), 30, "f32")


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32"])
def test_every_storage_type(native, kv_type):
    agree(plan_of("cumulative", 40), prompt(150), 30, kv_type)


def test_a_bound_that_is_never_reached_keeps_everything(native):
    p = prompt(150)
    ours = agree(plan_of("cumulative", 150), p, 30)
    assert all(len(kept) == 150 for layer in ours.kept for kept in layer)


def test_the_last_step_is_an_ordinary_compression_of_what_it_sees(native):
    """A single step over all tokens keeps the same as the compression of a prompt."""
    p, plan = prompt(200), plan_of("window", 50)
    whole = pykvedge.compress(plan, *p.arguments)
    one = pykvedge.compress(plan, *p.arguments, stream=200)
    for layer in range(2):
        for a, b in zip(whole.kept[layer], one.kept[layer], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize("prior", [False, True])
def test_heavy_hitters_in_loops(native, engine, prior):
    """H2O and LOOK-M step by step, one query after the other: the sums of held rows go on."""
    bound, step, p = 12, 6, prompt(45, (2, 2), layers=1, size=8)
    plan = pykvedge.plan("h2o", bound, text_prior=prior, recent=4)
    kept = pykvedge.compress(plan, *p.arguments, engine=engine, kv_type="f32", stream=step).kept[0]
    for h in range(2):
        held, sums = [], {}
        for first in range(0, 45, step):
            for t in range(first, min(first + step, 45)):
                held.append(t)
                sums[t] = 0.0
                query, keys = p.q[0, h, t].tolist(), [p.k[0, h, i].tolist() for i in held]
                row = oracles.attention_rows([query] * len(held), keys)[-1]
                for i, w in zip(held, row, strict=True):
                    sums[i] += w
            if len(held) > bound:
                scores, image = [sums[i] for i in held], [bool(p.image_mask[i]) for i in held]
                mixed = prior and any(image) and not all(image)
                best = oracles.text_prior(scores, image, bound, 4) if mixed else oracles.heavy_hitters(scores, bound, 4)
                held = [held[i] for i in best]
        assert list(kept[h]) == held


REFUSED = {
    "share": ("h2o", 0.2, {}),
    "ada": ("snapkv", 64, {"allocator": "ada"}),
    "pyramid": ("pyramidkv", 64, {}),
    "sliding": ("h2o", 64, {"decode": "sliding"}),
    "mean": ("roco", 64, {}),
    "joined": ("h2o", 64, {"scorer.share": "layer"}),
    "text": ("lookm", 64, {"text_overflow": "keep_all"}),
    "window": ("snapkv", 16, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_stream_is_refused_by_both(native, name):
    method, budget, settings = REFUSED[name]
    plan, p = pykvedge.plan(method, budget, **settings), prompt(20)
    with pytest.raises(UsageError):
        pykvedge.compress(plan, *p.arguments, stream=8)
    from pykvedge.reference.engine import Arrays
    from pykvedge.reference.kvtypes import KvType

    arrays = Arrays(*(np.ascontiguousarray(x) for x in p.arguments))
    with pytest.raises(UnsupportedError):
        compress_arrays(plan, arrays, KvType.parse("f16"), 1, step=8)
    with pytest.raises(UnsupportedError):
        compress_arrays(pykvedge.plan("h2o", 8), arrays, KvType.parse("q8_0"), 1, step=8)
    with pytest.raises(KvedgeError, match="would round rows"):
        pykvedge.compress(pykvedge.plan("h2o", 8), *p.arguments, kv_type="q8_0", stream=8)


def test_both_refuse_the_same_stages(native):
    from pykvedge.reference.engine import Arrays
    from pykvedge.reference.kvtypes import KvType

    p = prompt(20)
    arrays = Arrays(*(np.ascontiguousarray(x) for x in p.arguments))
    for stage in ("scorer", "reducer", "decode"):
        for name in members(stage):
            plan = pykvedge.plan("h2o", 64, **{stage: name})
            try:
                compress_arrays(plan, arrays, KvType.parse("f16"), 1, step=8)
                accepted = True
            except UnsupportedError:
                accepted = False
            assert accepted == can_stream(plan), name


def test_a_scorer_of_ones_own_sees_each_head_with_its_own_images(native):
    """A plugin's image mask, queries and column sums belong to the tokens that the head holds."""

    @pykvedge.scorer("mine", queries=3, column_sums=True, recent=4)
    def mine(layer, settings):
        group = len(layer.q) // len(layer.k)
        seen = np.stack([np.abs(layer.q[h * group, -1] @ k.T) for h, k in enumerate(layer.k)])
        return layer.column_sums + 0.5 * layer.image_mask + 0.01 * seen

    ours = agree(pykvedge.plan("h2o", 40, scorer="mine"), prompt(170, HEADS["gqa"], layout="scattered"), 30)
    assert all(len(kept) == 40 for layer in ours.kept for kept in layer)
    assert any(list(a) != list(ours.kept[0][0]) for a in ours.kept[0])


def test_a_reducer_of_ones_own(native):
    @pykvedge.reducer("halved")
    def halved(head, settings):
        return head.k[head.kept] / 2, head.v[head.kept] / 2

    agree(plan_of("position", 40, reducer="halved"), prompt(100), 30, "f32")
