"""Storage types: the definitions against the gguf package and KIVI's equations, libkvedge against the definitions, and
the rows that a running model stores."""

import itertools

import gguf
import numpy as np
import pytest
from arrays import profiles_of, prompt
from choosing import crossed, whole
from contexts import random_tokens
from test_decode_policies import running  # noqa: F401

import pykvedge
from pykvedge.errors import ArrayError, UnknownNameError
from pykvedge.native import calls
from pykvedge.plans.registry import members
from pykvedge.reference.checks import rules
from pykvedge.reference.kvtypes import NAMES, QUANTISED, KvType, definition
from pykvedge.reference.storage import round_to, stored_keys, stored_values

TYPES = [*QUANTISED, "q8_0:q4_0", "kivi4:kivi2", "q4_0:kivi4", "f32:kivi2", "kivi2:bf16"]
RESIDUAL = [name for name in QUANTISED if definition(name).residual]


def rows_of(n=70, d=64, seed=0):
    rng = np.random.default_rng([seed, n, d])
    rows = rng.standard_normal((n, d)) * rng.gamma(2.0, 1.0, (n, 1))
    rows[n // 2, :32] = 0  # a block of zeros, a block of equal numbers
    rows[n // 3, :32] = -1.5
    return round_to(rows, "f16")


# ---------------------------------------------------------------------------------------------------- definitions


def test_every_type_has_a_definition_and_its_kernels(native):
    assert sorted(calls.kv_types()) == sorted(NAMES) and {"q8_0", "q4_0", "kivi4", "kivi2"} <= set(QUANTISED)


@pytest.mark.parametrize("name", [name for name in QUANTISED if definition(name).ggml is not None])
def test_blocks_are_those_of_the_gguf_package(native, name):
    kind = gguf.GGMLQuantizationType(definition(name).ggml)
    assert kind.name.lower() == name
    for seed in range(20):
        rows = rows_of(seed=seed)
        packed = gguf.quants.quantize(rows, kind)
        assert packed.shape[1] == 64 * calls.kv_types()[name]
        np.testing.assert_array_equal(stored_keys(rows, name), gguf.quants.dequantize(packed, kind))


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_as_its_equations_say(bits):
    rows, levels = rows_of(96, 64).astype(np.float64), 2**bits - 1
    both = np.concatenate([rows, rows[:32]])  # the newest values stay unrounded
    keys, values = stored_keys(rows, f"kivi{bits}"), stored_values(both, f"kivi{bits}")
    for first, c in itertools.product(range(0, 96, 32), range(64)):  # a channel of 32 tokens
        x = rows[first : first + 32, c]
        step = (x.max() - x.min()) / levels
        assert np.abs(keys[first : first + 32, c] - x).max() <= step * (0.5 + levels / 1024) + 1e-6
        assert len(np.unique(keys[first : first + 32, c])) <= 2**bits
        assert keys[first : first + 32, c].min() == x.min()
    for t, c in itertools.product(range(96), (0, 32)):  # 32 channels of a token
        x = rows[t, c : c + 32]
        step = (x.max() - x.min()) / levels
        assert np.abs(values[t, c : c + 32] - x).max() <= step * (0.5 + levels / 1024) + 1e-6
    np.testing.assert_array_equal(values[32, :32], np.full(32, -1.5))  # all equal: there is no scale


@pytest.mark.parametrize("name", RESIDUAL)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 70])
def test_kivi_leaves_its_residual_alone(n, name):
    rows = rows_of(n)
    keys, values = stored_keys(rows, name), stored_values(rows, name)
    np.testing.assert_array_equal(keys[n - n % 32 :], rows[n - n % 32 :])
    np.testing.assert_array_equal(values[max(0, n - 32) :], rows[max(0, n - 32) :])
    assert n < 64 or np.abs(values[0] - rows[0]).max() > 0.01


def test_names():
    assert KvType.parse("q8_0:kivi2") == KvType("q8_0", "kivi2") and str(KvType.parse("q8_0:kivi2")) == "q8_0:kivi2"
    assert str(KvType.parse("q4_0")) == "q4_0" and KvType.parse("f32:q4_0").plain == KvType("f32", "f16")
    assert not KvType.parse("bf16:f32").quantised and KvType.parse("bf16:kivi4").quantised
    for bad in ("", ":", "q8_0:", ":q8_0", "q8_0:q8_0:q8_0", "Q8_0"):
        with pytest.raises(UnknownNameError, match="kv_type"):
            KvType.parse(bad)


# ---------------------------------------------------------------------------------------------------- both engines


def steps(rows, kv_type, of_keys):
    """Returns the largest distance of two roundings of nearly equal rows, per number: a step of its group."""
    n, d = rows.shape
    kind = definition(kv_type)
    if of_keys and kind.residual:
        out = np.zeros((n, d))
        for first in range(0, n, 32):
            out[first : first + 32] = np.ptp(rows[first : first + 32], axis=0) / kind.levels
        return out
    groups = rows.reshape(n, d // 32, 32)
    size = np.ptp(groups, axis=2, keepdims=True) if kind.minimum else np.abs(groups).max(axis=2, keepdims=True)
    return np.broadcast_to(size / kind.levels, groups.shape).reshape(n, d)


def assert_same(plan, p, kv_type):
    """The kept tokens are those of f16, and rows differ by at most a step; few numbers round otherwise."""
    types = KvType.parse(kv_type)
    how = {"profile": profiles_of(plan, p)}
    plain = pykvedge.compress(plan, *p.arguments, kv_type=types.plain, **how)
    ours, definition = (
        pykvedge.compress(plan, *p.arguments, kv_type=kv_type, kv_rotate="off", engine=engine, **how)
        for engine in ("native", "numpy")
    )
    np.testing.assert_array_equal(ours.scores, plain.scores)
    others = total = 0
    for i, h in itertools.product(range(p.k.shape[0]), range(p.k.shape[1])):
        np.testing.assert_array_equal(ours.kept[i][h], plain.kept[i][h])
        np.testing.assert_array_equal(ours.kept[i][h], definition.kept[i][h])
        near = 2e-3 + rules.FITTED.get(plan.reducer, (0.0, 0.0))[0] * np.abs(plain.v[i][h]).max()
        for ours_, theirs, before, name in (
            (ours.k[i][h], definition.k[i][h], plain.k[i][h], types.k),
            (ours.v[i][h], definition.v[i][h], plain.v[i][h], types.v),
        ):
            step = steps(before, name, ours_ is ours.k[i][h]) if name in QUANTISED else np.abs(before) / 256
            assert (np.abs(ours_ - before) <= 1.02 * step + 2e-3).all()
            assert (np.abs(ours_ - theirs) <= 1.02 * step + near).all()
            others += int((np.abs(ours_ - theirs) > 0.05 * step + near).sum())
            total += step.size
    assert others <= max(3, 0.002 * total)
    return ours


@pytest.mark.parametrize("kv_type", ["kivi2", *whole("q8_0")])
@pytest.mark.parametrize(
    ("scorer", "reducer"), crossed(members("scorer"), members("reducer"), ["pivotal"], ["cumulative"])
)
def test_every_scorer_and_reducer_sees_plain_numbers(native, scorer, reducer, kv_type):
    for n_tokens in (5, 170):
        plan = pykvedge.plan("h2o", 0.4, scorer=scorer, reducer=reducer, text_prior=True)
        assert_same(plan, prompt(n_tokens, (4, 2)), kv_type)


@pytest.mark.parametrize(("allocator", "kv_type"), crossed(members("allocator"), TYPES, ["kivi2"], ["ada"]))
def test_every_type_with_heads_of_different_lengths(native, allocator, kv_type):
    for size, budget in ((32, 0.3), (96, 0.7), (64, 1.0)):
        assert_same(pykvedge.plan("h2o", budget, allocator=allocator), prompt(150, (4, 2), size=size), kv_type)


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize("kv_type", QUANTISED)
def test_a_budget_of_everything_is_quantised_all_the_same(native, engine, kv_type):
    p = prompt(100, size=64)
    how = {"kv_type": kv_type, "kv_rotate": "off", "engine": engine}
    result = pykvedge.compress(pykvedge.plan("full"), *p.arguments, **how)
    for i, h in itertools.product(range(2), range(2)):
        np.testing.assert_array_equal(result.k[i][h], stored_keys(round_to(p.k[i, h], "f16"), kv_type))
        np.testing.assert_array_equal(result.v[i][h], stored_values(round_to(p.v[i, h], "f16"), kv_type))


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_head_sizes_that_do_not_fit(native, engine):
    for kv_type in (*QUANTISED, "f16:q8_0"):
        with pytest.raises(ArrayError, match="a multiple of 32, not 48"):
            pykvedge.compress(pykvedge.plan("h2o"), *prompt(40, size=48).arguments, kv_type=kv_type, engine=engine)


# ---------------------------------------------------------------------------------------------------- in a model


def expected_bytes(context, pairs, kv_type):
    """Returns the bytes of this number of pairs in every head, without residual and page rounding."""
    stats = context.cache.stats()
    size = context.llama.llama_model_n_embd(context.model) // context.llama.llama_model_n_head(context.model)
    return stats.n_layers * stats.n_heads_kv * pairs * 2 * size * KvType.parse(kv_type).bytes_per_value


@pytest.mark.parametrize(("kv_type", "budget"), crossed(NAMES, [0.25, 1.0], [0.25], ["f16", "kivi2"]))
def test_bytes_are_those_of_the_type(running, kv_type, budget):  # noqa: F811
    c = running(pykvedge.plan("h2o", budget), kv_type)
    c.decode(random_tokens(800))
    full = c.cache.stats().bytes
    assert full >= expected_bytes(c, 800, KvType.parse(kv_type).plain)
    c.cache.compress()
    pairs = int(800 * budget)
    residual = expected_bytes(c, 32, "f16") if kv_type in RESIDUAL else 0
    pages = 4 * 4096 * c.cache.stats().n_layers
    assert (
        expected_bytes(c, pairs, kv_type)
        <= c.cache.stats().bytes
        <= expected_bytes(c, pairs, kv_type) + residual + pages
    )
    before = c.cache.stats().bytes
    for step in range(300):  # generated tokens are f16 until a group is full
        c.decode(random_tokens(1, step))
    blocks = 12  # some blocks, each rounded up to whole pages
    added = expected_bytes(c, 300, kv_type) + expected_bytes(c, 96 if KvType.parse(kv_type).quantised else 256, "f32")
    assert c.cache.stats().bytes - before <= added + blocks * pages
    assert c.cache.stats().peak_bytes >= full


@pytest.mark.parametrize(("decode", "kv_type"), crossed(members("decode"), QUANTISED, ["kivi2"], ["sliding"]))
def test_decode_policies_hold_the_same_tokens_as_with_f16(running, decode, kv_type):  # noqa: F811
    held_tokens = []
    for kind in ("f16", kv_type):
        c = running(pykvedge.plan("streaming-llm", 0.2, decode=decode), kind)
        c.decode(random_tokens(300))
        for step in range(150):
            c.decode(random_tokens(1, step))
        c.decode(random_tokens(80, 7))
        for step in range(20):
            c.decode(random_tokens(1, step))
        held_tokens.append(c.held())
    if decode != "heavy-hitter":  # its choice depends on attention, which differs
        assert held_tokens[0] == held_tokens[1]


@pytest.mark.parametrize("kv_type", QUANTISED)
def test_cuts_and_copies(running, kv_type):  # noqa: F811
    c = running(pykvedge.plan("h2o", 0.5), kv_type)
    c.decode(random_tokens(200))
    for step in range(100):
        c.decode(random_tokens(1, step))
    memory = c.llama.llama_get_memory(c.context)
    before = c.held()
    c.llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    c.llama.llama_memory_seq_rm(memory, 0, 40, 230)
    cut = [[[t for t in head if not 40 <= t < 230] for head in heads] for heads in before]
    assert c.held() == cut
    c.llama.llama_memory_seq_rm(memory, 0, -1, -1)
    c.llama.llama_memory_seq_cp(memory, 1, 0, -1, -1)
    assert c.held() == before


def test_a_model_whose_heads_do_not_fit(kvedge, tiny):
    model = tiny("llama", head_size=48)
    done = kvedge("chat", *model.arguments(), "--kv-type", "kivi2", "--max-tokens", 2, "Hello")
    done.failed(1, "multiple of 32", "48")


def test_types_from_the_command_line(kvedge, tiny):
    base = ["chat", *tiny("llama").arguments(), "--json", "--max-tokens", 4, "--method", "full"]
    text = "word " * 500
    plain = kvedge(*base, text).json["kv"]
    for kv_type in ("q8_0", "kivi2", "q8_0:q4_0"):
        kv = kvedge(*base, "--kv-type", kv_type, text).json["kv"]
        share = KvType.parse(kv_type).bytes_per_value / 2
        assert kv["full_bytes"] == plain["full_bytes"]  # the prompt is read in f16
        assert 0.9 * share <= kv["kept_bytes"] / kv["full_bytes"] <= share + 0.1


def test_a_model_that_runs_as_it_is_cannot_be_quantised(kvedge, tiny):
    done = kvedge("chat", *tiny("mamba").arguments(), "--method", "full", "--kv-type", "q8_0", "Hello")
    done.failed(1, "q8_0", "f16")
