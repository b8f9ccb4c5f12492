"""Storage type tq3: its definition against searches of every scale, libkvedge against the definition, and a model."""

import numpy as np
import pytest
from arrays import prompt
from oracles import least_error_of_levels
from test_kv_rotate import context, converse, divergence  # noqa: F401

import pykvedge
from pykvedge.reference.kvtypes import KvType, definition
from pykvedge.reference.storage import rotated, round_to, stored_keys, stored_values


def blocks(kind, n=60):
    rng = np.random.default_rng(len(kind))
    drawn = {
        "normal": rng.standard_normal((n, 32)),
        "heavy": rng.standard_t(3, (n, 32)),
        "even": rng.uniform(-1, 1, (n, 32)),
        "one": np.eye(32)[rng.integers(0, 32, n)],
        "small": 1e-4 * rng.standard_normal((n, 32)),
    }
    return round_to(drawn[kind] * rng.gamma(2.0, 1.0, (n, 1)), "f16")


@pytest.mark.parametrize("kind", ["normal", "heavy", "even", "one", "small"])
def test_no_scale_is_much_better(kind):
    """The best of 400 scales for each block has at least ten elevenths of tq3's error; for uniform numbers, 5 / 6."""
    x = blocks(kind, 30)
    found = definition("tq3").rounded(x)
    least = sum(least_error_of_levels(row) for row in x)
    most = (1.2 if kind == "even" else 1.1) * least + 1e-6 * (x**2).sum()
    assert least * (1 - 1e-3) <= ((x - found) ** 2).sum() <= most


def test_normal_numbers_lose_less_than_with_the_best_levels_of_one_scale():
    """Max 1960, table I: 8 levels leave 0.03454 of the variance of a normal number."""
    x = np.random.default_rng(0).standard_normal((4000, 32)).astype(np.float32)
    error = ((x - definition("tq3").rounded(x)) ** 2).mean() / (x**2).mean()
    assert error < 0.0300


def test_a_block_is_eight_levels_of_one_scale_and_rounds_to_itself():
    x = np.concatenate([blocks(kind) for kind in ("normal", "heavy", "even", "one")])
    found = definition("tq3").rounded(x)
    for row in found:
        sizes, levels = np.unique(np.abs(row)), np.array([3, 9, 16, 26], np.float32)
        scales = [np.float32(np.float16(sizes.max() / top)) for top in levels]
        assert any(np.isin(sizes, scale * levels).all() for scale in scales)
    np.testing.assert_array_equal(definition("tq3").rounded(found), found)
    np.testing.assert_array_equal(definition("tq3").rounded(np.zeros((2, 32), np.float32)), np.zeros((2, 32)))
    np.testing.assert_array_equal(np.sign(found[x != 0]), np.sign(x[x != 0]))


@pytest.mark.parametrize("kv_type", ["tq3", "tq3:q4_0", "q8_0:tq3", "kivi4:tq3"])
@pytest.mark.parametrize("rotate", ["auto", "off"])
def test_the_library_rounds_by_the_definition(native, kv_type, rotate):
    """Equal bit for bit without rotation. Rotation adds in another order, so a few numbers may round otherwise."""
    types = KvType.parse(kv_type, rotate)
    for size in (32, 64, 96, 128):
        p = prompt(80, (4, 2), size=size)
        found = pykvedge.compress(pykvedge.plan("full"), *p.arguments, kv_type=kv_type, kv_rotate=rotate)
        for i, h in np.ndindex(2, 2):
            for rows, stored, side, of, block in zip((p.k, p.v), (found.k, found.v), (stored_keys, stored_values),
                                                     (types.k, types.v), types.blocks(size), strict=True):  # fmt: skip
                ours, theirs = stored[i][h], side(round_to(rows[i, h], "f16"), of, block)
                if block == 0:
                    np.testing.assert_array_equal(ours, theirs)
                else:
                    far = np.abs(rotated(ours - theirs, block)) > 1e-2 * np.abs(theirs).max()
                    assert far.mean() < 2e-3


def test_bits(native):
    assert 8 * KvType.parse("tq3").bytes_per_value == 3.5


@pytest.mark.parametrize("head_size", [64, 128])
def test_a_model_answers_from_it(context, head_size):  # noqa: F811
    """The loss of tq3 is between those of q4_0 and of two bits."""
    exact = converse(context("f16", head_size=head_size))
    lost = {t: divergence(exact, converse(context(t, head_size=head_size))) for t in ("q4_0", "tq3", "kivi2")}
    assert lost["q4_0"] < lost["tq3"] < lost["kivi2"]
