"""What a run leaves out by default: cases that repeat what others hold, or take long. `pytest --all` runs them, too."""

import functools
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from arrays import profiles_of, prompt

import pykvedge
from pykvedge.library.native_plan import replays, score_bytes, why_not_bounded
from pykvedge.plans.presets import DEFAULT_METHOD
from pykvedge.reference.checks.prompts import projection_of
from pykvedge.reference.held import round_to

SHAPES = ((1, 1, 8), (4, 1, 8), (4, 4, 8), (4, 4, 16))  # (H, Hkv, d_k) of a layer


def crossed(first: Iterable, second: Iterable, with_first: Sequence, with_second: Sequence):
    """Pairs of two things that do not see each other, as parameters of a test.

    By default each of `first` comes with each of `with_first`, and each of `second` with each of `with_second`.
    """
    first, second = list(first), list(second)
    if not {*with_first} <= {*second} or not {*with_second} <= {*first}:
        raise ValueError(f"{with_first} must be among {second}, and {with_second} among {first}")
    return [
        pytest.param(a, b, marks=() if b in with_first or a in with_second else pytest.mark.whole)
        for a, b in itertools.product(first, second)
    ]


def whole(*cases: object) -> list:
    """Marks cases that only --all runs. Each is the value of one parameter, or a tuple of several."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.whole) for case in cases]


def methods(names: Iterable[str]):
    """Methods as parameters of a test that asks of each what asks of a host: by default those of distinct()."""
    return [pytest.param(name, marks=() if name in distinct() else pytest.mark.whole) for name in names]


def few(chosen: Iterable[str], of: Iterable[str] = ()):
    """Methods as parameters of a test of what others test with distinct(): by default those chosen, if in `of`."""
    names = list(of) or pykvedge.methods()
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.whole) for name in names]


@functools.cache
def distinct() -> tuple[str, ...]:
    """Lists one method for each set of things that a host of libkvedge has to do for a plan.

    The library says what: a new method that asks for something else is in the list by itself. Of those that ask for
    the same, the list has the one whose scores hang on most: keys, values.
    """
    found: dict[object, list[tuple[int, str]]] = {}
    for name in sorted(pykvedge.methods(), key=lambda name: name != DEFAULT_METHOD):
        asked, n_read = wants(pykvedge.plan(name, None if name == "full" else 0.4))
        found.setdefault(asked, []).append((n_read, name))
    return tuple(max(group, key=lambda x: x[0])[1] for group in found.values())


def wants(plan: pykvedge.Plan) -> tuple[object, int]:
    """Says what a host of libkvedge has to do for a plan, and on how many of keys and values its scores hang."""
    p = prompt(60, layers=3)
    given = {"profile": profiles_of(plan, p), "projection": projection_of(plan, p)}

    def compressed(k, v):
        return pykvedge.compress(plan, p.q, k, v, p.image_mask, **given)

    result = compressed(p.k, p.v)
    others = compressed(p.k[:, :, ::-1], p.v), compressed(p.k, p.v[:, :, ::-1])
    heads = [(i, h) for i in range(p.k.shape[0]) for h in range(p.k.shape[1])]
    lengths = np.array([[len(head) for head in layer] for layer in result.kept])
    asked = (
        gathered(plan),
        replays(plan),
        why_not_bounded(plan),
        bool((lengths == lengths[:, :1]).all()),  # the heads of a layer keep as many
        bool((lengths.sum(axis=1) == lengths[0].sum()).all()),  # the layers do
        any((result.k[i][h] != round_to(p.k[i, h, result.kept[i][h]], "f16")).any() for i, h in heads),  # rows change
        any(result.bias[i][h].any() for i, h in heads),
        plan.decode,
        plan.pruner,
        plan.projects,
    )
    return asked, sum(bool((other.scores != result.scores).any()) for other in others)


def gathered(plan: pykvedge.Plan) -> tuple[object, ...]:
    """Says what is gathered of a prompt: bytes a token in layers of SHAPES, and how other bytes grow with d_k."""
    bytes_of = functools.partial(score_bytes, plan)
    a_token = [(bytes_of(2000, [shape]) - bytes_of(1000, [shape])) // 1000 for shape in SHAPES]
    once = [bytes_of(1000, [shape]) - 1000 * n for shape, n in zip(SHAPES[-2:], a_token[-2:], strict=True)]
    return (*a_token, once[1] / once[0] if once[0] else 0)
