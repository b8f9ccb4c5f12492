"""Rules that hold for every plan and every prompt. Each function checks one rule and raises BrokenRuleError."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pykvedge.errors import BrokenRuleError
from pykvedge.library.arrays import Result, compress
from pykvedge.plans.amounts import Budget
from pykvedge.plans.plan import Plan
from pykvedge.reference.checks.prompts import Prompt, profiles_of, projection_of
from pykvedge.reference.engine import protection, round_to

ENGINES = ("native", "numpy")
RELATIVE = {"f16": 1e-3, "bf16": 8e-3, "f32": 1e-3}  # tolerance of merged keys and values
# reducer -> tolerances of fitted values (relative to the largest) and of biases. The library solves in float32. If few
# queries look at a row, its weight depends on rounding, but attention outputs hardly depend on that weight.
FITTED = {"match": (1e-2, 1e-1)}
FLOAT32_NOISE = 1e-5  # allowed difference of two engines' scores, relative to the largest


def _compress(plan: Plan, p: Prompt, **settings: Any) -> Result:
    given = {"profile": profiles_of(plan, p), "projection": projection_of(plan, p)}
    return compress(plan, *p.arguments, **{**given, **settings})


def _heads(p: Prompt) -> Iterator[tuple[int, int]]:
    yield from itertools.product(range(p.k.shape[0]), range(p.k.shape[1]))


def _close(ours: np.ndarray, definition: np.ndarray, relative: float, absolute: float, what: str) -> None:
    near = np.isclose(ours, definition, rtol=relative, atol=absolute)
    if not near.all():
        at = tuple(int(i) for i in np.argwhere(~near)[0])
        raise BrokenRuleError(f"{what}{list(at)}: {ours[at]:.6g} natively, {definition[at]:.6g} by the definition")


def _same(a: np.ndarray, b: np.ndarray, what: str) -> None:
    if a.shape != b.shape or not np.array_equal(a, b):
        raise BrokenRuleError(f"{what}: {_short(a)} and {_short(b)}")


def _short(x: np.ndarray) -> str:
    return np.array2string(x, threshold=8, edgeitems=3).replace("\n", "")


def engines_agree(
    plan: Plan, p: Prompt, kv_type: str = "f16", threads: int = 0, near_ties: bool = False, absolute: float = 1e-4
) -> Result:
    """libkvedge and the NumPy engine keep the same tokens; scores, keys and values agree within 1e-3.

    threads: threads of the library; 0: chosen by the size of the prompt. near_ties: the engines may choose different
    tokens if the scores differ by less than float32 can tell. absolute: tolerance of keys and values near 0.
    Returns libkvedge's result.
    """
    ours = _compress(plan, p, engine="native", kv_type=kv_type, threads=threads)
    definition = _compress(plan, p, engine="numpy", kv_type=kv_type)
    _close(ours.scores, definition.scores, 1e-3, 1e-5, "score ")
    of_values, of_biases = FITTED.get(plan.reducer, (0.0, 0.0))
    for i, h in _heads(p):
        where = f"layer {i}, KV head {h}"
        a, b = ours.kept[i][h], definition.kept[i][h]
        if not np.array_equal(a, b):
            if near_ties and _nearly_tied(ours.scores[i, h], definition.scores[i, h], a, b):
                continue
            odd = np.setxor1d(a, b)
            raise BrokenRuleError(
                f"{where}: {len(a)} tokens kept natively, {len(b)} by the definition; they differ in {odd[:4]}"
            )
        _close(ours.k[i][h], definition.k[i][h], RELATIVE[kv_type], absolute, f"key of {where} ")
        apart = absolute + of_values * float(np.abs(definition.v[i][h]).max())
        _close(ours.v[i][h], definition.v[i][h], RELATIVE[kv_type], apart, f"value of {where} ")
        _close(ours.bias[i][h], definition.bias[i][h], 1e-6, 1e-6 + of_biases, f"bias of {where} ")
    return ours


def _nearly_tied(ours: np.ndarray, definition: np.ndarray, a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two selections of equal length differ only in tokens with nearly equal scores."""
    odd = np.setxor1d(a, b)
    if len(a) != len(b) or not np.isfinite(ours[odd]).all():
        return False
    spread = max(np.ptp(ours[odd]), np.ptp(definition[odd]))
    return not np.array_equal(ours[odd], definition[odd]) and spread <= FLOAT32_NOISE * np.abs(ours).max()


def budget_is_met(plan: Plan, p: Prompt, engine: str) -> None:
    """The number of kept pairs is the budget; each head's tokens are ascending, with one key row and value row each."""
    result = _compress(plan, p, engine=engine)
    n_layers, n_heads_kv, n_tokens, size = p.k.shape
    budget, total = plan.count(n_tokens), 0
    for i, h in _heads(p):
        kept, where = result.kept[i][h], f"layer {i}, KV head {h}"
        total += len(kept)
        if not 1 <= len(kept) <= n_tokens or kept.dtype != np.int32:
            raise BrokenRuleError(f"{where} keeps {len(kept)} of {n_tokens} tokens")
        if (np.diff(kept) <= 0).any() or kept[0] < 0 or kept[-1] >= n_tokens:
            raise BrokenRuleError(f"{where}: {_short(kept)} are not ascending tokens of {n_tokens}")
        if not result.k[i][h].shape == result.v[i][h].shape == (len(kept), size):
            raise BrokenRuleError(f"{where}: rows of shape {result.k[i][h].shape} for {len(kept)} tokens")
        if plan.allocator == "uniform" and len(kept) != budget:
            raise BrokenRuleError(f"{where} keeps {len(kept)} KV pairs, but the budget is {budget}")
    if total != budget * n_layers * n_heads_kv:
        raise BrokenRuleError(f"{total} KV pairs are kept, but the budget is {budget * n_layers * n_heads_kv}")
    if result.scores.shape != (n_layers, n_heads_kv, n_tokens):
        raise BrokenRuleError(f"the scores have shape {result.scores.shape}")


def protected_are_kept(plan: Plan, p: Prompt, engine: str) -> None:
    """Sinks and recent tokens stay, as far as a head's share covers them."""
    result = _compress(plan, p, engine=engine)
    n_tokens = p.k.shape[2]
    for i, h in _heads(p):
        kept = result.kept[i][h]
        lost = set(np.flatnonzero(protection(plan, n_tokens, len(kept))).tolist()) - set(kept.tolist())
        if lost:
            raise BrokenRuleError(f"layer {i}, KV head {h} does not keep the protected token {min(lost)}")


def everything_changes_nothing(plan: Plan, p: Prompt, engine: str) -> None:
    """A budget of 1.0 keeps every token and every row unchanged."""
    result = _compress(plan.with_(budget=Budget(ratio=1.0)), p, engine=engine)
    for i, h in _heads(p):
        where = f"layer {i}, KV head {h}"
        _same(result.kept[i][h], np.arange(p.k.shape[2]), f"tokens of {where}")
        _same(result.k[i][h], round_to(p.k[i, h], "f16"), f"keys of {where}")
        _same(result.v[i][h], round_to(p.v[i, h], "f16"), f"values of {where}")


def heads_commute(plan: Plan, p: Prompt, engine: str, order: Sequence[int]) -> None:
    """KV heads in another order keep the same tokens and keys. order: [Hkv] a permutation."""
    group = p.q.shape[1] // p.k.shape[1]
    query_order = [h * group + g for h in order for g in range(group)]
    result = _compress(plan, p, engine=engine)
    reordered = Prompt(p.q[:, query_order], p.k[:, order], p.v[:, order], p.image_mask)
    moved = _compress(plan, reordered, engine=engine)
    for i, h in _heads(p):
        j = list(order).index(h)
        _same(moved.kept[i][j], result.kept[i][h], f"layer {i}: KV head {h}, moved to {j}, keeps different tokens")
        _same(moved.k[i][j], result.k[i][h], f"layer {i}: KV head {h}, moved to {j}, has different keys")


def runs_repeat(plan: Plan, p: Prompt, engine: str) -> None:
    """A prompt gives the same result in every run, after other prompts, and on any number of threads."""
    first = _compress(plan, p, engine=engine, threads=1)
    backwards = Prompt(p.q[:, :, ::-1], p.k[:, :, ::-1], p.v[:, :, ::-1], p.image_mask[::-1])
    _compress(plan, backwards, engine=engine)
    second = _compress(plan, p, engine=engine, threads=3)
    _same(first.scores, second.scores, "scores of two runs differ")
    for i, h in _heads(p):
        where = f"layer {i}, KV head {h}"
        _same(first.kept[i][h], second.kept[i][h], f"{where}: two runs keep different tokens")
        _same(first.k[i][h], second.k[i][h], f"{where}: two runs have different keys")
        _same(first.v[i][h], second.v[i][h], f"{where}: two runs have different values")
