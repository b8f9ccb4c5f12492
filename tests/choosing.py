"""Chooses the test cases of a default run. Slow cases and repetitions are marked `whole`: `pytest --all` runs them."""

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
from pykvedge.reference.storage import round_to

SHAPES = ((1, 1, 8), (4, 1, 8), (4, 4, 8), (4, 4, 16))  # (query heads, KV heads, d_k) of a layer


def crossed(first: Iterable, second: Iterable, with_first: Sequence, with_second: Sequence):
    """Returns pairs of two independent things as parameters of a test."""
    first, second = list(first), list(second)
    if not {*with_first} <= {*second} or not {*with_second} <= {*first}:
        raise ValueError(f"{with_first} must be among {second}, and {with_second} among {first}")
    return [
        pytest.param(a, b, marks=() if b in with_first or a in with_second else pytest.mark.whole)
        for a, b in itertools.product(first, second)
    ]


def whole(*cases: object) -> list:
    """Marks cases that only --all runs. A case is the value of one parameter, or a tuple for several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.whole) for case in cases]


def methods(names: Iterable[str]):
    """Returns methods as parameters of a test. Methods outside distinct() run only with --all."""
    return [pytest.param(name, marks=() if name in distinct() else pytest.mark.whole) for name in names]


def few(chosen: Iterable[str], of: Iterable[str] = ()):
    """Returns methods as parameters of a test that covers less than distinct(). Default run: those in `chosen`."""
    names = list(of) or pykvedge.methods()
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.whole) for name in names]


@functools.cache
def distinct() -> tuple[str, ...]:
    """Returns one method for each distinct set of tasks that a plan gives to a host of libkvedge.

    The sets come from the library, so a new method with a new set is included without a change here. From methods with
    the same set, the method is taken whose scores depend on most of: keys, values.
    """
    found: dict[object, list[tuple[int, str]]] = {}
    for name in sorted(pykvedge.methods(), key=lambda name: name != DEFAULT_METHOD):
        asked, n_read = host_tasks(pykvedge.plan(name, None if name == "full" else 0.4))
        found.setdefault(asked, []).append((n_read, name))
    return tuple(max(group, key=lambda x: x[0])[1] for group in found.values())


def host_tasks(plan: pykvedge.Plan) -> tuple[object, int]:
    """Returns the tasks of a libkvedge host for a plan, and how many of keys and values change the scores (0 to 2)."""
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
        bool((lengths == lengths[:, :1]).all()),  # equal numbers of KV pairs in the heads of a layer
        bool((lengths.sum(axis=1) == lengths[0].sum()).all()),  # equal numbers in all layers
        any((result.k[i][h] != round_to(p.k[i, h, result.kept[i][h]], "f16")).any() for i, h in heads),  # changed rows
        any(result.bias[i][h].any() for i, h in heads),
        plan.decode,
        plan.pruner,
        plan.projects,
    )
    return asked, sum(bool((other.scores != result.scores).any()) for other in others)


def gathered(plan: pykvedge.Plan) -> tuple[object, ...]:
    """Returns bytes per token of gathered data for layers of SHAPES, and the growth of the other bytes with d_k."""
    bytes_of = functools.partial(score_bytes, plan)
    a_token = [(bytes_of(2000, [shape]) - bytes_of(1000, [shape])) // 1000 for shape in SHAPES]
    once = [bytes_of(1000, [shape]) - 1000 * n for shape, n in zip(SHAPES[-2:], a_token[-2:], strict=True)]
    return (*a_token, once[1] / once[0] if once[0] else 0)
