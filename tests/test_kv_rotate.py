"""Rows that are rotated before quantisation: the matrix and its effect against loops, libkvedge against the definition,
running models, session files and devices."""

import itertools
import math
import struct

import gguf
import numpy as np
import pytest
from arrays import prompt
from choosing import crossed
from contexts import TinyContext, random_tokens
from conversations import LONG, SHORT, WORDS, fingerprint_of, reframed, say
from test_session_files import assert_same, state

import pykvedge
from kvedge_lab.eval.metrics import log_softmax
from pykvedge.errors import ArrayError, SessionFileError, UnknownNameError, UnsupportedError
from pykvedge.library import libkvedge
from pykvedge.native.abi import DEVICES_ALL
from pykvedge.native.calls import lib
from pykvedge.reference.kvtypes import QUANTISED, KvType, definition
from pykvedge.reference.storage import hadamard, rotated, round_to, stored_keys, stored_values

TYPES = [name for name in QUANTISED if not definition(name).residual]
ROTATED_FILE, OLDER_FILE = 2, 1  # versions of session files


def by_signs(row, block):
    """Multiplies a row by the matrix with entries (-1)^(number of common bits of i and j) / sqrt(block)."""
    out = np.zeros(len(row))
    for first in range(0, len(row), block):
        for i, j in itertools.product(range(block), range(block)):
            out[first + i] += (-1) ** bin(i & j).count("1") * float(row[first + j]) / math.sqrt(block)
    return out


def outlying(n, d, channel, gain, seed=0):
    """Returns rows with one large channel."""
    rows = np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)
    rows[:, channel] *= gain
    return round_to(rows, "f16")


# ------------------------------------------------------------------------------------------------ the definition


@pytest.mark.parametrize("size, block", [(64, 64), (192, 64), (128, 128), (256, 256)])
def test_the_matrix_is_of_signs_and_its_own_inverse(size, block):
    rows = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    turned = rotated(rows, block)
    for row, found in zip(rows, turned, strict=True):
        np.testing.assert_allclose(found, by_signs(row, block), atol=2e-6)
    np.testing.assert_allclose(rotated(turned, block), rows, atol=2e-6)
    np.testing.assert_allclose(hadamard(block) @ hadamard(block), np.eye(block), atol=1e-6)
    assert rotated(rows, 0) is rows


def test_who_is_rotated_is_llama_cpps_rule():
    for size, key in ((64, 64), (128, 128), (192, 64), (256, 256), (320, 64), (384, 128)):
        assert KvType.parse("q4_0").blocks(size) == (key, 64) and KvType.parse("q8_0", "off").blocks(size) == (0, 0)
    assert KvType.parse("q8_0").blocks(96) == KvType.parse("q8_0").blocks(80) == (0, 0)
    assert KvType.parse("kivi4:q4_0").blocks(128) == (0, 64) and KvType.parse("q8_0:kivi2").blocks(128) == (128, 0)
    assert KvType.parse("f16").blocks(128) == KvType.parse("kivi2").blocks(128) == (0, 0)
    for name, size in (("q8_0", 96), ("f16", 64), ("kivi4", 128)):
        with pytest.raises(ArrayError, match="kv_rotate"):
            KvType.parse(name, "on").blocks(size)
    with pytest.raises(UnknownNameError, match="kv_rotate"):
        KvType.parse("q8_0", "perhaps")


@pytest.mark.parametrize("name", [name for name in TYPES if definition(name).ggml is not None])
def test_rows_are_rounded_where_they_are_rotated(name):
    rows, kind = outlying(5, 128, 3, 4.0), gguf.GGMLQuantizationType(definition(name).ggml)
    turned = np.stack([by_signs(row, 128) for row in rows]).astype(np.float32)
    stored = gguf.quants.dequantize(gguf.quants.quantize(turned, kind), kind)
    expected = np.stack([by_signs(row, 128) for row in stored])
    step = np.abs(turned).max() / definition(name).levels
    found = stored_keys(rows, name, 128)
    assert (np.abs(found - expected).max(axis=1) < 1e-4).sum() >= 3  # a tie may fall otherwise in a row
    assert np.abs(found - expected).max() < step


def test_a_channel_that_stands_out_costs_the_others_less():
    keys, queries = outlying(200, 128, 17, 20.0), np.random.default_rng(1).standard_normal((50, 128))
    queries[:, 17] /= 20

    def error(block):
        return np.sqrt((((stored_keys(keys, "q4_0", block) - keys) @ queries.T) ** 2).mean())

    assert error(128) < 0.5 * error(0)


# ------------------------------------------------------------------------------------------------ both engines


ROUNDED = [*TYPES, "q8_0:q4_0", "q4_0:kivi4", "kivi4:q8_0", "f32:q4_0"]


@pytest.mark.parametrize(("kv_type", "reducer"), crossed(ROUNDED, ["evict", "pivotal"], ["evict"], ["q8_0:q4_0"]))
def test_both_engines_round_alike(native, kv_type, reducer):
    plan = pykvedge.plan("h2o", 0.4, reducer=reducer)
    types = KvType.parse(kv_type)
    for size in (64, 128, 192):
        p = prompt(100, (4, 2), size=size)
        plain = pykvedge.compress(plan, *p.arguments, kv_type=types.plain)
        ours, theirs = (
            pykvedge.compress(plan, *p.arguments, kv_type=kv_type, engine=engine) for engine in ("native", "numpy")
        )
        np.testing.assert_array_equal(ours.scores, plain.scores)
        for i, h in itertools.product(range(2), range(2)):
            np.testing.assert_array_equal(ours.kept[i][h], plain.kept[i][h])
            np.testing.assert_array_equal(ours.kept[i][h], theirs.kept[i][h])
            sides = ((ours.k, theirs.k, plain.k, types.k), (ours.v, theirs.v, plain.v, types.v))
            for (a, b, before, name), block in zip(sides, types.blocks(size), strict=True):
                if block == 0:
                    continue
                a, b, before = (rotated(x[i][h], block).reshape(-1, 32) for x in (a, b, before))
                step = np.abs(before).max(axis=1, keepdims=True) / definition(name).levels
                assert (np.abs(a - before) <= 1.02 * step + 2e-3).all()
                assert (np.abs(a - b) > 0.05 * step + 2e-3).mean() <= 0.002


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_what_is_not_rotated_is_as_it_was(native, engine):
    plan = pykvedge.plan("full")
    for size, rotate in ((96, "auto"), (64, "off"), (128, "off")):
        p = prompt(60, size=size)
        for name in TYPES:
            found = pykvedge.compress(plan, *p.arguments, kv_type=name, kv_rotate=rotate, engine=engine)
            for i, h in itertools.product(range(2), range(2)):
                np.testing.assert_array_equal(found.k[i][h], stored_keys(round_to(p.k[i, h], "f16"), name))
                np.testing.assert_array_equal(found.v[i][h], stored_values(round_to(p.v[i, h], "f16"), name))
    with pytest.raises(ArrayError, match="a multiple of 64"):
        pykvedge.compress(plan, *prompt(40, size=96).arguments, kv_type="q8_0", kv_rotate="on", engine=engine)


# ------------------------------------------------------------------------------------------------ in a model


@pytest.fixture
def context(closing, tiny):
    def start(kv_type, rotate="auto", plan=None, **shape):
        model = tiny("llama", weight="f32", **shape).model
        return closing(TinyContext(model, plan or pykvedge.plan("full"), KvType.parse(kv_type, rotate), n_ctx=2048))

    return start


def converse(c):
    """Returns log-probabilities after each token of an answer, and of a second message and its answer."""
    out = []
    for turn in range(2):
        c.decode(random_tokens(300, turn))
        c.cache.compress()
        for step in range(40):
            c.decode(random_tokens(1, 50 * turn + step))
            out.append(log_softmax(c.logits()))
    return np.stack(out)


def divergence(exact, other):
    return float((np.exp(exact) * (exact - other)).sum(axis=1).mean())


def test_outliers_of_a_model_cost_less_when_rotated(context):
    exact = converse(context("f16", key_outliers=8.0))
    lost = {how: divergence(exact, converse(context("q4_0", how, key_outliers=8.0))) for how in ("off", "auto", "on")}
    assert lost["auto"] == lost["on"] < 0.5 * lost["off"]


@pytest.mark.parametrize(
    ("head_size", "kv_type"), crossed([64, 128], ["q8_0", "q8_0:kivi4", "f16:q8_0"], ["q8_0"], [64])
)
def test_answers_are_those_of_plain_rows_but_for_rounding(context, kv_type, head_size):
    exact, found = (converse(context(t, head_size=head_size)) for t in ("f16", kv_type))
    assert divergence(exact, found) < 5e-3


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_rows_that_are_read_back_are_plain(context, kv_type):
    plan = pykvedge.plan("knorm", 0.5)
    caches = [context("f16", plan=plan), context(kv_type, "on", plan), context(kv_type, "off", plan)]
    for c in caches:
        c.decode(random_tokens(200))
        c.cache.compress()
        for step in range(33):  # a group is quantised when it is full
            c.decode(random_tokens(1, step))
    for layer, head in itertools.product(range(1), range(2)):
        exact, turned, plain = (libkvedge.rows(c.cache, layer, head) for c in caches)
        for a, b, c in zip(exact, turned, plain, strict=True):
            size = np.linalg.norm(a, axis=1)
            limit = 0.01 if kv_type == "q8_0" else 0.15
            assert (np.linalg.norm(b - a, axis=1) < limit * size).all() and not np.array_equal(b[:100], c[:100])


def test_what_cannot_be_rotated_is_refused(kvedge, native, tiny):
    narrow, plain = tiny("llama", head_size=32), tiny("llama")
    with pytest.raises(UnsupportedError, match="a multiple of 64"):
        say(narrow.session(kv_type="q8_0", kv_rotate="on"), WORDS)
    base = ("chat", *plain.arguments(), "--max-tokens", 2, "--kv-rotate")
    kvedge(*base, "on", "Hello").failed(1, "f16", "q8_0")
    kvedge(*base, "perhaps", "Hello").failed(2, "--kv-rotate")
    assert kvedge(*base, "on", "--kv-type", "q4_0", "--method", "full", "Hello").code == 0


# ------------------------------------------------------------------------------------------------ files, devices


def version_of(file):
    return struct.unpack_from("<I", file.read_bytes(), 8)[0]


@pytest.mark.parametrize("saved, loaded", [("auto", "off"), ("off", "auto"), ("on", "on")])
def test_a_conversation_goes_on_as_its_file_is(native, tiny, tmp_path, saved, loaded):
    file, model, plan = tmp_path / "s.kvs", tiny("llama"), pykvedge.plan("h2o", 0.4)
    with model.session(plan, kv_type="q4_0", kv_rotate=saved) as session:
        say(session, WORDS, sampling=LONG)
        session.save(file)
        say(session, "And then?", sampling=SHORT)
        expected = state(session)
    assert version_of(file) == (OLDER_FILE if saved == "off" else ROTATED_FILE)
    with model.session(plan, kv_type="q4_0", kv_rotate=loaded) as session:
        session.load(file)
        again = tmp_path / "again.kvs"
        session.save(again)
        assert version_of(again) == version_of(file)
        with session.fork() as other:
            say(other, "And then?", sampling=SHORT)
            assert_same(state(other), dict(expected))
        say(session, "And then?", sampling=SHORT)
        assert_same(state(session), expected)


def test_a_file_that_says_wrongly_that_it_is_rotated(native, tiny, tmp_path):
    for kv_type, size in (("kivi4", 64), ("f16", 64), ("q8_0", 32)):
        file, model = tmp_path / "s.kvs", tiny("llama", head_size=size)
        with model.session(pykvedge.plan("h2o", 0.4), kv_type=kv_type) as session:
            say(session, WORDS)
            session.save(file)
        data = file.read_bytes()
        assert version_of(file) == OLDER_FILE
        n_note = struct.unpack_from("<Q", data, 16)[0]
        payload = bytearray(data[32 + len(fingerprint_of(file)) + n_note + 4 : -4])
        payload[1] |= 1  # second byte: the type of keys
        file.write_bytes(reframed(data, payload=bytes(payload), version=ROTATED_FILE))
        with model.session(kv_type=kv_type) as session, pytest.raises(SessionFileError, match="damaged"):
            session.load(file)


def test_rows_on_a_device_are_not_rotated_by_themselves(context, native):
    for how, device in (("auto", True), ("off", True), ("on", False)):
        c = context("q8_0", how)
        c.cache.detach()
        c.llama.llama_memory_clear(c.memory, True)
        c.cache = libkvedge.Cache(c.context, pykvedge.plan("full"), KvType.parse("q8_0", how), devices=DEVICES_ALL)
        assert (lib().kvedge_layer_device(c.cache.handle, 0) is not None) == device
