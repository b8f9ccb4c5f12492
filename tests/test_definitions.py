"""The NumPy definitions against second implementations in plain loops, and against statements of the papers."""

import numpy as np
import oracles
import pytest
from arrays import prompt

import pykvedge
from pykvedge.plans.registry import STAGES, member, members
from pykvedge.reference.engine import round_to, select
from pykvedge.reference.stages.base import DecodeState, Head, Layer

MERGES = ("averaged", "pivotal", "weighted")


def run(plan, p, kv_type="f32"):
    return pykvedge.compress(plan, *p.arguments, engine="numpy", kv_type=kv_type)


def test_every_stage_has_members_and_each_says_what_it_is():
    for stage in STAGES:
        found = members(stage)
        assert found
        for name, m in found.items():
            assert m.name == name and m.stage == stage and m.summary and m.source


@pytest.mark.parametrize(
    ("name", "whole", "recent"),
    [
        ("cumulative", 0, [(100, 100, 50), (10, 100, 5)]),
        ("expected", 4, [(100, 100, 32), (10, 100, 5), (40, 40, 20)]),
        ("keydiff", 0, [(100, 100, 32), (10, 100, 5), (40, 40, 20)]),
        ("mean", 0, [(100, 100, 10), (5, 100, 1), (29, 100, 2)]),
        ("mixkv", 32, [(100, 100, 32), (10, 100, 5), (40, 40, 20)]),
        ("modal", 24, [(100, 100, 1), (1, 100, 1)]),
        ("position", 0, [(100, 100, 0)]),
        ("window", 32, [(100, 100, 32), (10, 100, 5), (40, 40, 20)]),
    ],
)
def test_what_a_scorer_keeps_whatever_the_scores(native, name, whole, recent):
    """recent: (pairs of a head, an even share, last tokens that recent = auto protects), by the papers."""
    scorer = member("scorer", name)
    settings = {p.name: p.default for p in scorer.params}
    assert scorer.whole_up_to(settings) == whole and scorer.sinks_first == (name == "position")
    assert [scorer.auto_recent(kept, even, settings) for kept, even, _ in recent] == [n for _, _, n in recent]
    assert scorer.reserved(29, settings) == (8 if name == "mean" else 0)  # a share of 0.3, rounded down


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("n_tokens", [1, 2, 7, 23])
def test_cumulative_scores_are_the_column_sums_of_the_attention(n_tokens, heads):
    p = prompt(n_tokens, heads, layers=1, size=8)
    scores = member("scorer", "cumulative").score(Layer(p.q[0], p.k[0], p.v[0], p.image_mask), {"share": "head"})
    group = heads[0] // heads[1]
    for h in range(heads[1]):
        sums = [oracles.column_sums(p.q[0, h * group + g].tolist(), p.k[0, h].tolist()) for g in range(group)]
        np.testing.assert_allclose(scores[h], np.mean(sums, axis=0), rtol=1e-9)
    assert scores.sum() == pytest.approx(n_tokens * heads[1])  # every query spends a weight of one


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_ratio_keeps_the_floor_of_its_share(ratio):
    plan = pykvedge.plan("h2o", ratio)
    for n_tokens in range(1, 700):
        assert plan.count(n_tokens) == oracles.budget(n_tokens, ratio)


@pytest.mark.parametrize(
    ("n_tokens", "ratio"), [(1, 0.5), (2, 0.5), (3, 0.9), (10, 0.05), (57, 0.05), (57, 0.2), (57, 0.9)]
)
@pytest.mark.parametrize("layout", ["text", "image", "two_images", "image_last"])
def test_h2o_and_lookm_keep_what_the_papers_keep(n_tokens, ratio, layout):
    p = prompt(n_tokens, layers=1, layout=layout)
    n = oracles.budget(n_tokens, ratio)
    for name, oracle in (("h2o", None), ("lookm", oracles.text_prior)):
        result = run(pykvedge.plan(name, ratio, reducer="evict"), p)
        for h in range(2):
            scores = [np.mean(x) for x in zip(*(oracles.column_sums(p.q[0, 2 * h + g].tolist(), p.k[0, h].tolist())
                                               for g in range(2)), strict=True)]  # fmt: skip
            mixed = p.image_mask.any() and not p.image_mask.all()
            if oracle and mixed:
                expected = oracle(scores, p.image_mask.tolist(), n, n // 2)
            else:
                expected = oracles.heavy_hitters(scores, n, n // 2)
            assert result.kept[0][h].tolist() == expected


@pytest.mark.parametrize("n_tokens", [1, 3, 5, 40])
@pytest.mark.parametrize("budget", [4, 5, 20, 64, 0.05, 0.1, 0.5])
def test_streaming_llm_keeps_the_sinks_and_the_latest(n_tokens, budget):
    result = run(pykvedge.plan("streaming-llm", budget), prompt(n_tokens))
    n = min(budget, n_tokens) if isinstance(budget, int) else oracles.budget(n_tokens, budget)
    assert result.kept[1][0].tolist() == oracles.streaming(n_tokens, n, 4)


def test_protection_shrinks_as_the_budget_does():
    scores, text = np.zeros(50), np.zeros(50, dtype=bool)
    h2o = pykvedge.plan("h2o", 0.2, recent=6, sinks=3)
    assert select(h2o, scores, text, 10).tolist() == [0, 1, 2, 3, *range(44, 50)]
    assert select(h2o, scores, text, 8).tolist() == [0, 1, *range(44, 50)]  # the recent tokens stay
    assert select(h2o, scores, text, 4).tolist() == [46, 47, 48, 49]
    streaming = pykvedge.plan("streaming-llm", 0.2, recent=6)
    assert select(streaming, scores, text, 8).tolist() == [0, 1, 2, 3, 46, 47, 48, 49]  # the sinks stay
    assert select(streaming, scores, text, 3).tolist() == [0, 1, 2]


def test_recent_as_a_ratio_is_a_share_of_the_prompt():
    plan = pykvedge.plan("h2o", 0.5, recent=0.1)
    assert plan.protected(35, 17) == (3, 0)
    assert pykvedge.plan("h2o", 0.5).protected(35, 17) == (8, 0)


def test_equal_scores_go_to_the_lower_index():
    p = prompt(12, layout="text")
    p.q[:] = p.k[:] = 0  # uniform attention: more queries see earlier tokens
    assert run(pykvedge.plan("h2o", 6, recent=2), p).kept[0][0].tolist() == [0, 1, 2, 3, 10, 11]
    plan = pykvedge.plan("lookm", 6, recent=0)
    image = np.array([True, False] * 6)
    assert select(plan, np.ones(12), image, 8).tolist() == [0, 1, 2, 3, 5, 7, 9, 11]


def test_text_beyond_the_budget_is_dropped_or_kept_as_the_plan_says():
    p = prompt(60, layout="two_images")
    text = set(np.flatnonzero(~p.image_mask))
    paper = run(pykvedge.plan("lookm", 10, recent=2), p).kept[0][0]
    assert len(paper) == 10 and set(paper.tolist()) <= text | {58, 59}
    released = run(pykvedge.plan("lookm", 10, recent=2, text_overflow="keep_all"), p).kept[0][0]
    assert set(released.tolist()) == text | {58, 59}
    alone = prompt(60, layout="text")
    assert len(run(pykvedge.plan("lookm", 10, text_overflow="keep_all"), alone).kept[0][0]) == 10


@pytest.mark.parametrize("layout", ["text", "image"])
def test_text_prior_changes_nothing_for_a_prompt_of_one_kind(layout):
    p = prompt(40, layout=layout)
    with_prior = run(pykvedge.plan("lookm", 0.3), p)
    without = run(pykvedge.plan("lookm", 0.3, text_prior=False), p)
    for a, b in zip(with_prior.kept[0], without.kept[0], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", MERGES)
@pytest.mark.parametrize("n_tokens", [2, 5, 31])
def test_merges_are_the_equations_of_the_paper(kind, n_tokens):
    p = prompt(n_tokens, layers=1, size=8)
    result = run(pykvedge.plan("lookm", 0.4, reducer=kind), p)
    for h in range(2):
        kept = result.kept[0][h].tolist()
        k, v = oracles.merge(p.k[0, h].tolist(), p.v[0, h].tolist(), kept, kind)
        np.testing.assert_allclose(result.k[0][h], k, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.v[0][h], v, rtol=1e-5, atol=1e-6)


def head(k, kept, v=None):
    k = np.asarray(k, dtype=np.float32)
    v = k + 1 if v is None else np.asarray(v, dtype=np.float32)
    return Head(k, v, np.asarray(kept, dtype=np.int32), np.zeros(len(k), dtype=bool))


def reduced(kind, h, **changed):
    """Returns the result of a reducer for a head, with default settings except those in `changed`."""
    m = member("reducer", kind)
    return m.reduce(h, {**{p.name: p.default for p in m.params}, **changed})


def test_figure_4_of_lookm_the_most_similar_kept_token_receives():
    # two kept directions; two of three evicted tokens resemble the first
    k = [[1, 0], [0, 1], [2, 1], [1, 3], [3, 1]]
    out, _ = member("reducer", "averaged").reduce(head(k, [0, 1]), {})
    np.testing.assert_allclose(out, [[(1 + 2 + 3) / 3, (0 + 1 + 1) / 3], [1 / 2, (1 + 3) / 2]])


def test_the_pivot_keeps_at_least_half_of_the_weight():
    for n_merged in range(8):
        k = [[1.0, 0.0]] + [[1e-3, 0.0]] * n_merged
        v = [[1.0, 0.0]] + [[0.0, 0.0]] * n_merged
        _, out = member("reducer", "pivotal").reduce(head(k, [0], v), {})
        assert out[0, 0] == pytest.approx((1 + n_merged / 2) / (n_merged + 1))
        assert out[0, 0] >= 0.5


def test_weighted_merge_uses_negative_similarities_as_they_are():
    out, _ = reduced("weighted", head([[1, 0], [-2, 0]], [0]))
    np.testing.assert_allclose(out, [[(1 + -1 * -2) / 2, 0]])
    out, _ = reduced("weighted", head([[1, 0], [-2, 0]], [0]), clamp=True)
    np.testing.assert_allclose(out, [[1 / 2, 0]])


@pytest.mark.parametrize("kind", MERGES)
def test_keys_without_a_direction_neither_move_nor_attract(kind):
    k = [[1, 0], [0, 0], [0, 0], [3, 0]]
    out, _ = reduced(kind, head(k, [0, 1]))
    np.testing.assert_allclose(out[1], [0, 0])  # a kept key of norm 0 attracts nothing
    expected, _ = reduced(kind, head([[1, 0], [3, 0]], [0]))
    np.testing.assert_allclose(out[0], expected[0])  # the evicted zero is dropped unmerged
    nowhere, _ = reduced(kind, head([[0, 0], [1, 0]], [0]))
    np.testing.assert_allclose(nowhere, [[0, 0]])


@pytest.mark.parametrize("kind", MERGES)
def test_equal_similarities_go_to_the_lower_index(kind):
    k = [[1, 1], [1, 1], [2, 2]]
    out, _ = reduced(kind, head(k, [0, 1]))
    np.testing.assert_allclose(out[1], [1, 1])
    assert out[0, 0] > 1


def test_rounding_to_the_storage_types():
    x = np.array([1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, -1e-8], dtype=np.float32)
    np.testing.assert_array_equal(round_to(x, "f16"), x.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(round_to(x, "bf16")[:5], [1.0, 1.0, 1.0, 1.0, 1 + 2**-6])
    np.testing.assert_array_equal(round_to(x, "f32"), x)


def test_keep_all_evicts_nothing():
    assert member("decode", "keep-all").evict(DecodeState(900, 100, 100, 500, 600, 4), {}) is None


@pytest.mark.parametrize("name", ["fixed-point", "ratio"])
@pytest.mark.parametrize(("distance", "row"), [(24, 2), (25, 1), (26, 13), (40, 13)])
def test_the_fixed_place_is_in_the_middle_where_the_distance_leaves_no_row_before_it(name, distance, row):
    state = DecodeState(prompt=100, kept=26, budget=20, generated=50, length=40, sinks=0)
    assert member("decode", name).evict(state, {"distance": distance, "relative": False}) == row
