"""compress: its results and its refusals."""

import numpy as np
import pytest
from arrays import prompt

import pykvedge
from pykvedge.errors import ArrayError, UnknownNameError

PLAN = pykvedge.plan("lookm", 0.25)


def test_result_has_one_entry_per_layer_and_head(native):
    p = prompt(40, heads=(4, 2), layers=3)
    result = pykvedge.compress(PLAN, *p.arguments)
    assert [len(layer) for layer in result.kept] == [2, 2, 2]
    assert result.kept[2][1].shape == (10,) and result.k[2][1].shape == (10, 32)
    assert result.scores.shape == (3, 2, 40) and result.scores.dtype == np.float32


def test_inputs_are_left_alone_and_may_be_any_float_layout(native):
    p = prompt(20)
    before = [x.copy() for x in p.arguments]
    first = pykvedge.compress(PLAN, *p.arguments)
    for x, y in zip(p.arguments, before, strict=True):
        np.testing.assert_array_equal(x, y)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2).astype(np.float64) for x in (p.q, p.k, p.v)]
    second = pykvedge.compress(PLAN, *swapped, p.image_mask)
    np.testing.assert_array_equal(first.k[0][0], second.k[0][0])


def broken(**changes):
    p = prompt(20)
    return {"q": p.q, "k": p.k, "v": p.v, "image_mask": p.image_mask, **changes}


P = prompt(20)
NAN = P.k.copy()
NAN[0, 0, 0, 0] = np.nan


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize(("changes", "says"), [
    ({"q": P.q[0]}, "q must have four dimensions"),
    ({"q": P.q.astype(int)}, "q must hold floating-point numbers"),
    ({"q": "words"}, "q must have four dimensions"),
    ({"q": [[1], [1, 2]]}, "q is not an array"),
    ({"k": P.k[:, :, :19]}, "same shape"),
    ({"q": P.q[:, :, :19]}, "agree in L, T and d"),
    ({"q": P.q[:1]}, "agree in L, T and d"),
    ({"q": P.q[:, :3]}, "multiple of the KV heads"),
    ({"q": P.q[..., :12], "k": P.k[..., :12], "v": P.v[..., :12]}, "multiple of 8"),
    ({"q": P.q[:, :, :0], "k": P.k[:, :, :0], "v": P.v[:, :, :0]}, "four dimensions"),
    ({"k": NAN}, "k holds NaN"),
    ({"v": P.v * np.float32(np.inf)}, "v holds NaN or infinite"),
    ({"k": P.k * np.float32(1e6)}, "k has values that f16 cannot represent"),
    ({"image_mask": P.image_mask[:-1]}, r"image_mask must be \[20\] of bool"),
    ({"image_mask": P.image_mask.astype(np.float32)}, "image_mask must be"),
])  # fmt: skip
def test_arrays_that_cannot_be_used_are_refused(engine, changes, says):
    with pytest.raises(ArrayError, match=says):
        pykvedge.compress(PLAN, **broken(**changes), engine=engine)


def test_large_values_fit_the_other_storage_types(native):
    p = prompt(20)
    large = p.k * np.float32(1e6)
    for kv_type in ("bf16", "f32"):
        for engine in ("native", "numpy"):
            assert np.isfinite(pykvedge.compress(PLAN, p.q, large, p.v, engine=engine, kv_type=kv_type).k[0][0]).all()


def test_unknown_names(native):
    with pytest.raises(UnknownNameError, match="did you mean 'numpy'"):
        pykvedge.compress(PLAN, *P.arguments, engine="nump")
    with pytest.raises(UnknownNameError, match="unknown kv_type 'q8_1'"):
        pykvedge.compress(PLAN, *P.arguments, kv_type="q8_0:q8_1")
    with pytest.raises(ArrayError, match="plan must be"):
        pykvedge.compress("lookm", *P.arguments)


@pytest.mark.parametrize("step", [-1, 2.5, "8"])
def test_a_stream_in_steps_that_are_no_number_of_tokens_is_refused(step):
    with pytest.raises(ArrayError, match=f"stream must be a number of tokens, or 0, not {step!r}"):
        pykvedge.compress(pykvedge.plan("h2o", 10), *P.arguments, stream=step)
