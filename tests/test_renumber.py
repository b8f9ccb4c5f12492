"""Smaller positions: libkvedge against the definition, position by position, and against llama.cpp's shift."""

import ctypes

import numpy as np
import pytest
from choosing import crossed
from contexts import TinyContext, random_tokens
from test_expected import Watched, rotation_of, turned_otherwise
from test_provider import divergence

import pykvedge
from pykvedge import Rotation, StateError, UnsupportedError, UsageError
from pykvedge.library import libkvedge


def renumbered(positions, taken, held, following, most):
    """Returns the new positions by the rule of kvedge_renumber, position by position."""
    used = [False] * following
    for p, n, h in zip(positions, taken, held, strict=True):
        for i in range(p, min(p + n, following)):
            used[i] = used[i] or h
    surplus = following - most
    if surplus <= 0:
        return np.array(positions)
    to, closed = {}, 0
    for p in range(following):  # closes gaps, the oldest first
        to[p] = p - closed
        closed += closed < surplus and not used[p]
    if closed < surplus:
        old = following - most // 2
        n_old = sum(used[:old])
        for p in range(following):
            rank = sum(used[:p])
            to[p] = p - surplus if p >= old else rank * (most - most // 2) // n_old
    return np.array([to[p] for p in positions])


def sequences(seed):
    """Returns ascending positions, with gaps and images whose tokens share one, and which tokens are held."""
    rng = np.random.default_rng(seed)
    positions, taken, at = [], [], 0
    while len(positions) < rng.integers(5, 60):
        at += int(rng.integers(0, 4)) if rng.random() < 0.3 else 0
        n, extent = (int(rng.integers(2, 9)), int(rng.integers(1, 5))) if rng.random() < 0.2 else (1, 1)
        positions += [at] * n
        taken += [extent] * n
        at += extent
    held = rng.random(len(positions)) < rng.choice([0.1, 0.5, 0.95])
    return np.array(positions), np.array(taken), held, at


def test_order_stays_and_distances_never_grow():
    for seed in range(40):
        positions, taken, held, following = sequences(seed)
        for most in {1, 2, following // 2 or 1, following - 1 or 1, following, following + 5}:
            new = renumbered(positions, taken, held, following, most)
            before, after = np.diff([*positions, following]), np.diff([*new, min(most, following)])
            assert (after >= 0).all() and (after <= before).all()
            if len({p + i for p, n, h in zip(positions, taken, held, strict=True) for i in range(n) if h}) <= most:
                continue
            recent = positions >= following - most // 2
            assert (following - positions[recent] == min(most, following) - new[recent]).all()


def test_positions_that_fit_stay_apart():
    positions, held = np.arange(100), np.arange(100) % 3 == 0
    new = renumbered(positions, np.ones(100, int), held, 100, 40)
    assert len({*new[held]}) == held.sum() and new[99] == 39


# ------------------------------------------------------------------------------------------------------------


class Moving(Watched):
    """A context that knows its tokens' positions, and the extent of each: 1, or that of its image."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.positions, self.taken = [], []
        self.cache.set_auto_compress(False)

    def read(self, tokens):
        self.positions += range(self.at, self.at + len(tokens))
        self.taken += [1] * len(tokens)
        super().read(tokens)

    def look(self, down, across):
        self.positions += [self.at] * (down * across)
        self.taken += [max(down, across)] * (down * across)
        super().look(down, across)

    def rows(self):
        """Returns tokens, keys and values: [layer][head]."""
        lengths = self.cache.lengths()
        return [[(self.cache.tokens(i, h), *libkvedge.rows(self.cache, i, h)) for h in range(len(heads))]
                for i, heads in enumerate(lengths)]  # fmt: skip

    def renumber(self, most):
        """Renumbers, and updates the positions by the definition. Returns the changes."""
        held = np.isin(np.arange(len(self.positions)), [t for layer in self.held() for head in layer for t in head])
        new = renumbered(np.array(self.positions), np.array(self.taken), held, self.at, most)
        self.at = self.cache.renumber(self.at, most)
        by, self.positions = new - self.positions, new.tolist()
        return by


def check_turned(context, rotation, most):
    """Checks that all keys are the earlier keys, turned by definition; values and tokens stay."""
    before, by = context.rows(), context.renumber(most)
    assert by.min() < 0 and context.at == most
    for old, new in zip(before, context.rows(), strict=True):
        for (tokens, k, v), (same, turned, v_now) in zip(old, new, strict=True):
            assert tokens == same
            np.testing.assert_array_equal(v, v_now)
            np.testing.assert_allclose(turned, rotation.on(k, by[tokens]), atol=2e-5 * np.abs(k).max())
    assert context.llama.llama_memory_seq_pos_max(context.memory, 0) == context.positions[-1]
    assert context.cache.cells() == 1


@pytest.fixture
def moving(closing):
    return lambda *arguments, **options: closing(Moving(*arguments, n_ctx=1024, threads=2, **options))


@pytest.mark.parametrize("most", [120, 60])  # gaps suffice, or not
@pytest.mark.parametrize(("kind", "pairs"), [
    ("llama", "norm"), *((kind, "neox") for kind in ("qwen3", "phi3", "qwen2vl", "qwen3vl")),
])  # fmt: skip
def test_keys_turn_as_defined(tiny, moving, kind, pairs, most):
    """Heads hold different tokens. Some tokens were removed before, some are pending, some are new."""
    model = tiny(kind).model
    context = moving(model, pykvedge.plan("snapkv", 0.3), "f32")
    context.read(random_tokens(150))
    if kind.endswith("vl"):
        context.look(5, 7)
        context.read(random_tokens(9, 1))
        context.look(3, 2)
    context.cache.compress()
    context.read(random_tokens(30, 2))
    check_turned(context, rotation_of(model, pairs), most)
    context.read(random_tokens(10, 3))  # llama.cpp continues there
    check_turned(context, rotation_of(model, pairs), most - 20)


@pytest.mark.parametrize("of", ["yarn", "linear", "base"])
def test_contexts_that_turn_otherwise_than_their_model(tiny, moving, of):
    model = tiny("llama").model
    adjusted, angles = turned_otherwise(model, of)
    context = moving(model, pykvedge.plan("h2o", 0.3), "f32", adjusted=adjusted)
    context.read(random_tokens(200))
    context.cache.compress()
    context.read(random_tokens(20, 2))
    check_turned(context, Rotation(angles, "norm"), 100)


@pytest.mark.parametrize("decode", ["sliding", "heavy-hitter"])
@pytest.mark.parametrize("most", [170, 60])
def test_rows_of_an_answer_that_a_policy_bounds_turn(native, tiny, decode, most):
    """Heads drop rows during the answer. Renumbering a copy turns only the copy's keys."""
    model = tiny("qwen3").model
    with TinyContext(model, pykvedge.plan("h2o", 0.3, decode=decode), "f32", n_ctx=1024) as context:
        for tokens in (random_tokens(150), *([t] for t in random_tokens(45, 1))):
            context.decode(tokens)
        context.llama.llama_memory_seq_cp(context.memory, 0, 1, -1, -1)
        held, lengths = context.held(), context.cache.lengths()
        before = [[libkvedge.rows(context.cache, i, h)[0] for h in range(2)] for i in range(2)]
        mask = np.isin(np.arange(195), [t for layer in held for head in layer for t in head])
        by = renumbered(np.arange(195), np.ones(195, int), mask, 195, most) - np.arange(195)
        assert context.cache.renumber(195, most, sequence=1) == most
        assert lengths == context.cache.lengths(1)
        for i, heads in enumerate(held):
            for h, tokens in enumerate(heads):
                k = before[i][h]
                turned = rotation_of(model, "neox").on(k, by[tokens])
                np.testing.assert_allclose(
                    libkvedge.rows(context.cache, i, h, 1)[0], turned, atol=2e-5 * np.abs(k).max()
                )
                np.testing.assert_array_equal(libkvedge.rows(context.cache, i, h)[0], k)
        context.n[1] = most
        context.decode([7], [8])
        assert context.n == {0: 196, 1: most + 1}


@pytest.mark.parametrize("kv_type", ["f16", "bf16"])
def test_rows_are_those_of_a_prompt_at_these_positions(tiny, moving, kv_type):
    """A single layer's rows depend only on their token and position. Turned rows are rounded once more."""
    model = tiny("qwen3", n_layers=1).model
    context, tokens = moving(model, pykvedge.plan("streaming-llm", 64), kv_type), random_tokens(300)
    context.read(tokens)
    context.cache.compress_stream()
    context.renumber(64)
    kept = context.held()[0][0]
    fresh = moving(model, pykvedge.plan("full"), kv_type)
    fresh.read([tokens[t] for t in kept])
    assert [context.positions[t] for t in kept] == list(range(64))
    for (_, k, v), (_, k_fresh, v_fresh) in zip(context.rows()[0], fresh.rows()[0], strict=True):
        np.testing.assert_array_equal(v, v_fresh)
        np.testing.assert_allclose(k, k_fresh, atol=2 ** {"f16": -10, "bf16": -7}[kv_type] * np.abs(k).max())


@pytest.mark.parametrize(("kind", "side"), crossed(["llama", "qwen3", "phi3"], ["full", "graph"], ["full"], ["llama"]))
def test_the_model_goes_on_as_llama_cpp_does_behind_a_shift(worker, stock_env, tiny, tmp_path, kind, side):
    """Unpatched llama.cpp removes tokens and turns the later keys (llama_memory_seq_add)."""
    model = tiny(kind).model
    worker("renumber_worker.py", None, model, tmp_path / "stock.npy", "stock", env=stock_env)
    worker("renumber_worker.py", None, model, tmp_path / "ours.npy", side)
    stock, ours = np.load(tmp_path / "stock.npy"), np.load(tmp_path / "ours.npy")
    assert divergence(stock[1:], ours[1:]).max() <= 1e-4
    assert divergence(stock[:1], stock[1:2]) > 1e-3  # differs without the shift


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_messages_over_whole_rows_go_on_as_llama_cpp_does(worker, stock_env, tiny, tmp_path, kind):
    model = tiny(kind).model
    worker("renumber_worker.py", None, model, tmp_path / "stock.npy", "stock", env=stock_env)
    worker("renumber_worker.py", None, model, tmp_path / "ours.npy", "whole")
    stock, ours = np.load(tmp_path / "stock.npy"), np.load(tmp_path / "ours.npy")
    assert divergence(stock[2::2], ours[1:]).max() <= 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "qwen2vl"])
@pytest.mark.parametrize("method", ["snapkv", "mixkv", "expected"])
def test_scores_see_the_turn(tiny, moving, method, kind):
    """All held rows move equally, so the attention of the last or of future queries stays the same."""
    context = moving(tiny(kind).model, pykvedge.plan(method, 32, allocator="uniform"), "f32")
    context.read(random_tokens(200))
    context.llama.llama_memory_seq_rm(context.memory, 0, 0, 90)
    context.read(random_tokens(40, 1))
    before = [libkvedge.pending_scores(context.cache, layer) for layer in range(2)]
    assert context.cache.renumber(240, 150) == 150
    for layer, scores in enumerate(before):
        np.testing.assert_allclose(libkvedge.pending_scores(context.cache, layer), scores, rtol=1e-3, atol=1e-6)


def test_sequences_turn_before_they_are_saved_and_after_they_were_loaded(tiny, moving, tmp_path):
    made = []
    for early in (True, False):
        context = moving(tiny("llama").model, pykvedge.plan("h2o", 0.2))
        context.read(random_tokens(200))
        context.cache.compress()
        if early:
            assert context.cache.renumber(200, 90) == 90
        context.cache.save(bytes(tmp_path / "a.kvs"), "m", b"")
        other = moving(tiny("llama").model, pykvedge.plan("h2o", 0.2))
        other.cache.load(bytes(tmp_path / "a.kvs"), "m")
        if not early:
            assert other.cache.renumber(200, 90) == 90
        assert other.llama.llama_memory_seq_pos_max(other.memory, 0) == 89
        made += [other.rows(), context.rows() if early else made[0]]
    for a, b, c in zip(*made[:3], strict=True):
        np.testing.assert_array_equal(a[0][1], b[0][1])
        np.testing.assert_array_equal(a[0][1], c[0][1])


def test_nothing_changes_where_positions_fit(tiny, moving):
    context = moving(tiny("llama").model, pykvedge.plan("h2o", 0.2))
    assert context.cache.renumber(50, 10) == 50  # nothing was read
    context.read(random_tokens(50))
    before = context.rows()
    assert context.cache.renumber(50, 50) == 50 and context.cache.cells() == 50
    for a, b in zip(before, context.rows(), strict=True):
        np.testing.assert_array_equal(a[0][1], b[0][1])


# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "kv_type", "why"), [
    *((kind, "f16", f"stores {n} of the")
      for kind, n in (("gemma3", 2), ("lfm2", 2), ("qwen35", 2), ("gemma3n", 4), ("gemma4e", 2), ("llama4", 1))),
    ("llama", "q8_0", "stored as q8_0"),
])  # fmt: skip
def test_what_cannot_turn_is_refused(native, tiny, kind, kv_type, why):
    with TinyContext(tiny(kind).model, pykvedge.plan("h2o", 0.2), kv_type) as context:
        context.decode([5 + t % 390 for t in random_tokens(100)])
        with pytest.raises(UnsupportedError, match=why):
            context.cache.renumber(100, 50)
        context.decode([7, 8, 9])  # at 100: nothing has changed


def test_calls_that_fit_no_sequence_are_refused(tiny, moving):
    context = moving(tiny("llama").model, pykvedge.plan("h2o", 0.2))
    context.read(random_tokens(60))
    with pytest.raises(UsageError, match="is at position 59, so the next token cannot have position 40"):
        context.cache.renumber(40, 20)
    for most in (0, -1):
        with pytest.raises(UsageError, match="most is below 1"):
            context.cache.renumber(60, most)
    assert libkvedge.lib().kvedge_renumber(context.cache.handle, 0, 20, None, None) == 1
    matched = moving(tiny("llama").model, pykvedge.plan("h2o", 0.2, reducer="match"))
    matched.read(random_tokens(60))
    with pytest.raises(StateError, match="compress the prompt before"):
        matched.cache.renumber(60, 20)
    assert ctypes.c_int32(matched.at).value == 60
