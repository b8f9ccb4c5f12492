"""Wraps a plan's plugin stages in structs of kvedge.h, so that C can call their Python functions."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pykvedge.errors import PluginError
from pykvedge.native.stage_structs import STRUCTS, AllocateInput, ReduceInput, ScoreInput
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugins import table
from pykvedge.reference.stages import base

STATUS_STAGE = 8  # KVEDGE_E_STAGE


def _copy(pointer: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Copies an array: C frees it, and a plugin may keep it."""
    return np.ctypeslib.as_array(pointer, shape).copy()


class PluginStages:
    """The plugin stages of a plan, as structs for kvedge_plan_add_*.

    Must live as long as C uses the plan. An exception cannot pass through C, so this object keeps it.
    """

    def __init__(self, plan: Plan) -> None:
        self.structs: dict[str, c.Structure] = {}  # by stage
        self.unset: set[str] = set()  # stages whose settings C does not know
        # C does not know a plugin's pruner: Python calls it (runtime/pruning.py)
        self.unknown = {"pruner"} if table.get("pruner", plan.pruner) is not None else set[str]()
        self._failure: BaseException | None = None
        for stage in table.COMPRESSING:
            plugin = table.get(stage, getattr(plan, stage))
            if plugin is None:
                continue
            if plugin.native is not None:
                self.structs[stage] = plugin.native
                continue
            self.unset.add(stage)
            self.structs[stage] = self._struct(stage, plugin, plan.settings(stage))

    def _struct(self, stage: str, plugin: table.Plugin, settings: base.Settings) -> c.Structure:
        kind, prototype = STRUCTS[stage]
        runs: dict[str, Any] = {"scorer": _score, "allocator": _allocate, "reducer": _reduce}
        run = runs[stage]

        def call(given: Any, *others: Any) -> int:
            try:
                run(plugin.member, settings, given.contents, *others[:-1])
            except BaseException as error:  # must not pass through C; `explained` raises the exception again
                self._failure = error
                others[-1].contents.message = str(error).encode()[:499]
                return STATUS_STAGE
            return 0

        struct = kind(struct_size=c.sizeof(kind), name=plugin.member.name.encode(), call=prototype(call))
        if stage == "scorer":
            struct.n_queries, struct.recent = plugin.queries(settings), plugin.recent(settings)
            struct.column_sums = plugin.column_sums
        return struct

    @contextmanager
    def explained(self) -> Iterator[None]:
        """If C reports a failed stage inside the block, raises the stage's exception instead."""
        try:
            yield
        except PluginError:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure from failure.__cause__
            raise


def _score(member: base.Scorer, settings: base.Settings, given: ScoreInput, out: Any) -> None:
    heads, n_tokens = given.n_heads_kv, given.n_tokens
    queries = np.zeros((given.n_heads, 0, given.d_k), dtype=np.float32)
    if given.q:
        queries = _copy(given.q, (given.n_queries, given.n_heads, given.d_k)).swapaxes(0, 1)
    k, v = _copy(given.k, (heads, n_tokens, given.d_k)), _copy(given.v, (heads, n_tokens, given.d_v))
    mask = _copy(given.image_mask, (n_tokens,)).astype(bool)
    sums = _copy(given.column_sums, (heads, n_tokens)) if given.column_sums else None
    layer = base.Layer(queries, k, v, mask, given.layer, given.n_layers, sums)
    np.ctypeslib.as_array(out, (heads, n_tokens))[:] = member.score(layer, settings)


def _allocate(member: base.Allocator, settings: base.Settings, given: AllocateInput, out: Any) -> None:
    heads = given.n_heads_kv[: given.n_layers]
    if len(set(heads)) != 1:
        raise PluginError(
            f"allocator '{member.name}' cannot be used, because the layers of this model differ in "
            f"their number of KV heads"
        )
    shape = (given.n_layers, heads[0])
    scores = _copy(given.scores, (*shape, given.n_tokens)).astype(np.float64)
    mask = _copy(given.image_mask, (given.n_tokens,)).astype(bool)
    counts = member.allocate(base.Prompt(scores, mask, given.budget, given.recent), settings)
    np.ctypeslib.as_array(out, shape)[:] = counts


def _reduce(member: base.Reducer, settings: base.Settings, given: ReduceInput, k: Any, v: Any) -> None:
    n, index = given.n_tokens, np.arange(given.n_tokens)
    whole = _copy(given.k, (n, given.d_k)), _copy(given.v, (n, given.d_v))
    protected = (index < given.sinks) | (index >= n - given.recent)
    head = base.Head(*whole, _copy(given.kept, (given.n_kept,)), protected, given.layer, given.n_layers, given.head)
    rows = member.reduce(head, settings)
    for to, width, values in ((k, given.d_k, rows[0]), (v, given.d_v, rows[1])):
        with np.errstate(over="ignore"):
            np.ctypeslib.as_array(to, (given.n_kept, width))[:] = values
