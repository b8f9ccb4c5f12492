"""Streams in contexts: kept tokens, constant memory, cells of llama.cpp, and removed or copied rows."""

import sys
from itertools import chain

import numpy as np
import pytest
from contexts import TinyContext, random_tokens

import pykvedge
from pykvedge.errors import StateError, UnsupportedError
from pykvedge.library import libkvedge
from pykvedge.system.memory import own_bytes

BOUND = 40


def feed(context, sizes, seed=0):
    """Reads n random tokens for each n in sizes, and compresses after each."""
    for i, n in enumerate(sizes):
        context.decode(random_tokens(n, seed + i))
        context.cache.compress_stream()


@pytest.fixture
def opened(closing, tiny):
    return lambda plan, kind="llama", **settings: closing(TinyContext(tiny(kind).model, plan, **settings))


@pytest.mark.parametrize(("scorer", "part", "sign"), [("knorm", 0, -1), ("vnorm", 1, 1)])
def test_kept_are_the_best_rows_of_all_that_a_head_holds(opened, scorer, part, sign):
    context = opened(pykvedge.plan("h2o", BOUND, scorer=scorer, recent=8, sinks=2))
    cache, different = context.cache, False
    for i, n in enumerate((30, 25, 64, 5, 1, 40)):
        context.decode(random_tokens(n, i))
        expected, scored = [], []
        for layer, heads in enumerate(cache.lengths()):
            for h, length in enumerate(heads):
                tokens = cache.tokens(layer, h)
                scores = sign * np.linalg.norm(libkvedge.rows(cache, layer, h)[part].astype(np.float64), axis=1)
                if length > BOUND:
                    inner = np.argsort(-scores[2 : length - 8], kind="stable")[: BOUND - 10] + 2
                    rows = sorted({0, 1, *inner.tolist(), *range(length - 8, length)})
                    tokens = [tokens[r] for r in rows]
                scored.append(dict(zip(cache.tokens(layer, h), scores, strict=True)))
                expected.append(tokens)
        cache.compress_stream()
        found = [tokens for heads in context.held() for tokens in heads]
        for mine, theirs, score in zip(found, expected, scored, strict=True):
            assert len(mine) == len(theirs) and mine == sorted(mine)
            # in single precision, either of two nearly equal norms may be taken
            gone, come = (sorted(score[t] for t in set(a) - set(b)) for a, b in ((theirs, mine), (mine, theirs)))
            assert come == pytest.approx(gone, rel=1e-6)
        different = different or any(tokens != found[0] for tokens in found)
    assert different  # heads chose different tokens


def test_column_sums_count_every_query_also_generated_ones(opened):
    """H2O's sums in a stream equal llama.cpp's attention while nothing is dropped."""
    ours, stock = opened(pykvedge.plan("h2o", 500), kv_type="f32"), opened(None)
    sums: dict[int, np.ndarray] = {}
    for tokens in (random_tokens(20), random_tokens(33), *([t] for t in random_tokens(6, 3))):
        for context in (ours, stock):
            context.decode(tokens)
        ours.cache.compress_stream()
        for layer, weights in stock.attention.items():
            new = weights.sum(axis=1)
            old = sums.get(layer, np.zeros((len(new), 0)))
            sums[layer] = new + np.pad(old, ((0, 0), (0, new.shape[1] - old.shape[1])))
    for layer in sums:
        scores = libkvedge.pending_scores(ours.cache, layer)
        grouped = sums[layer].reshape(len(scores), -1, scores.shape[1]).mean(axis=1)
        np.testing.assert_allclose(scores, grouped, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["streaming-llm", "h2o", "lookm", "snapkv", "mixkv"])
def test_a_stream_goes_far_beyond_the_context(opened, method):
    context = opened(pykvedge.plan(method, BOUND), n_ctx=256)
    sizes, scores, peaks = [], [], []
    for i in range(40):
        feed(context, [60], i)
        stats = context.cache.stats()
        assert context.cache.lengths() == [[BOUND] * len(heads) for heads in context.cache.lengths()]
        assert context.cache.cells() <= 60
        sizes.append(stats.bytes)
        scores.append(stats.score_bytes)
        peaks.append(stats.peak_bytes)
    stats = context.cache.stats()
    assert stats.n_tokens == 2400 and stats.n_pending == BOUND and stats.n_compressions == 40
    assert len(set(sizes)) == 1 and len(set(scores[2:])) == 1
    assert peaks[-1] - peaks[4] <= 40 * 60 * 5 * 1.25  # a position and a kind for every token, nothing else
    for token in random_tokens(150):  # an answer
        context.decode([token])
        if context.n[0] % 50 == 0:
            context.cache.compress_stream()
    assert max(n for heads in context.cache.lengths() for n in heads) <= BOUND + 50
    newest = context.held()[0][0][-5:]
    assert newest == sorted(newest) and newest[-1] == context.n[0] - 1


def test_nothing_changes_while_the_bound_is_ample(opened):
    """Greedy tokens of a stream whose bound holds everything equal those of the full cache."""
    answers = []
    for plan in (pykvedge.plan("full"), pykvedge.plan("h2o", 4000)):
        context, out = opened(plan), []
        for i in range(5):
            context.decode(random_tokens(50, i))
            if plan.method != "full":
                context.cache.compress_stream()
        for _ in range(20):
            out.append(int(context.logits().argmax()))
            context.decode([out[-1]])
            if plan.method != "full":
                context.cache.compress_stream()
        answers.append(out)
    assert answers[0] == answers[1]


def test_layers_that_llama_cpp_keeps_bound_the_stream(opened):
    context = opened(pykvedge.plan("h2o", BOUND), "gemma3", n_ctx=256)
    feed(context, [60, 60, 60])
    assert context.cache.cells() == 180
    assert {n for heads in context.cache.lengths() for n in heads} == {BOUND}


def test_what_was_compressed_before_can_become_a_stream(opened):
    context = opened(pykvedge.plan("h2o", BOUND))
    context.decode(random_tokens(100))
    context.cache.compress()
    context.decode(random_tokens(30))
    assert context.cache.stats().n_pending == 30
    context.cache.compress_stream()
    assert context.cache.stats().n_pending == BOUND
    feed(context, [30, 30])
    assert {n for heads in context.cache.lengths() for n in heads} == {BOUND}
    context.decode(random_tokens(30))
    context.cache.compress()  # the same for a stream
    assert context.cache.stats().n_pending == BOUND


def test_what_cannot_become_a_stream_is_left_alone(opened):
    context = opened(pykvedge.plan("pyramidkv", 0.6))
    context.decode(random_tokens(100))
    context.cache.compress()
    held = context.held()
    with pytest.raises(UnsupportedError, match="a ratio needs a complete prompt"):
        context.cache.compress_stream()
    context.cache.set_plan(pykvedge.plan("h2o", 20))
    with pytest.raises(UnsupportedError, match="different numbers"):
        context.cache.compress_stream()
    assert context.held() == held
    context.decode(random_tokens(30))
    context.cache.compress()
    quantised = opened(pykvedge.plan("h2o", 20), kv_type="q8_0")
    with pytest.raises(UnsupportedError, match="each compression would round quantised rows again"):
        quantised.cache.compress_stream()


def test_a_plan_may_change_on_the_way(opened):
    context = opened(pykvedge.plan("streaming-llm", BOUND))
    feed(context, [60, 60])
    context.cache.set_plan(pykvedge.plan("snapkv", 36))
    with pytest.raises(StateError):  # no query was kept for it yet
        context.cache.compress_stream()
    feed(context, [50])
    assert {n for heads in context.cache.lengths() for n in heads} == {36}
    context.cache.set_plan(pykvedge.plan("h2o", 30))
    feed(context, [50, 50])
    assert {n for heads in context.cache.lengths() for n in heads} == {30}
    context.cache.set_plan(pykvedge.plan("h2o", 30, decode="sliding"))
    with pytest.raises(UnsupportedError, match="sliding"):
        context.cache.compress_stream()


def test_rows_that_llama_cpp_removes(opened):
    context = opened(pykvedge.plan("h2o", BOUND, recent=0, sinks=3))
    feed(context, [60, 60, 60])
    before = context.held()
    assert any(tokens != before[0][0] for heads in before for tokens in heads)
    context.llama.llama_memory_seq_rm(context.memory, 0, 140, -1)  # as for an undone answer
    fewest = min(sum(t < 140 for t in tokens) for heads in before for tokens in heads)
    for old, new in zip(chain(*before), chain(*context.held()), strict=True):
        assert len(new) == fewest and set(new) <= set(old) and max(new) < 140 and new[:3] == [0, 1, 2]
        left = [t for t in old if t < 140]
        assert new[3:] == left[len(left) - fewest + 3 :]  # the oldest after the sinks were dropped
    context.n[0] = 140
    assert context.cache.stats().n_pending == fewest
    feed(context, [60, 60])
    assert {n for heads in context.cache.lengths() for n in heads} == {BOUND}


def test_copies_of_a_stream_go_their_own_way(opened):
    context = opened(pykvedge.plan("h2o", BOUND))
    feed(context, [60, 60])
    context.llama.llama_memory_seq_cp(context.memory, 0, 1, -1, -1)
    context.n[1] = context.n[0]
    assert context.held(0) == context.held(1)
    first = context.held(0)
    tokens = random_tokens(60, 9)
    context.decode([], tokens)
    context.cache.compress_stream(1)
    assert context.held(0) == first and context.held(1) != first
    context.decode(tokens)
    context.cache.compress_stream(0)
    assert context.held(0) == context.held(1)


def test_the_last_attention_is_watched_until_it_is_compressed(opened):
    context = opened(pykvedge.plan("h2o", BOUND))
    context.cache.watch(True)
    feed(context, [60])
    context.decode([7])
    weights = context.cache.attention(0, 0)
    assert len(weights) == BOUND + 1 and weights.sum() == pytest.approx(1, abs=1e-3)
    context.cache.compress_stream()
    with pytest.raises(StateError):
        context.cache.attention(0, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_system_sees_no_growth(native, tiny):
    model = tiny("llama", n_layers=2, n_heads=8, n_heads_kv=8, head_size=128, weight="q8_0").model
    with TinyContext(model, pykvedge.plan("h2o", 512), n_ctx=1024) as context:
        sizes = []
        for i in range(24):
            feed(context, [256], i)
            sizes.append(round(own_bytes() / 2**20, 1))
        row = 2 * 8 * 256 * 2  # bytes of a token
        assert context.cache.stats().bytes >= 512 * row
        # would detect a growth of a fifteenth, but not a single step of the C library's heap
        assert max(sizes[4:]) - sizes[4] <= 20 * 256 * row / 2**20 / 15, sizes
