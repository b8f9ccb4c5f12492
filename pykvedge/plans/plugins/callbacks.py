"""Stages of the program's own, by ctypes: structs of kvedge.h, Python functions as callbacks, C functions as members.

Apart from libkvedge.py because it knows arrays and plugins and needs no library: a shared library of stages can be
loaded, and its members run by the NumPy engine, without libkvedge.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pykvedge.errors import KvedgeError, PluginError, UsageError
from pykvedge.native.abi import Error, Setting, text
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugins import calling, table
from pykvedge.plans.stages import base

STATUS_STAGE = 8  # KVEDGE_E_STAGE
PLUGIN_SYMBOL = "kvedge_plugin_v1"


_F, _I, _D, _U8 = (c.POINTER(t) for t in (c.c_float, c.c_int32, c.c_double, c.c_uint8))


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, c.c_int32) for name in names]


class _ScoreInput(c.Structure):
    _fields_ = [
        *_ints("layer", "n_layers", "n_heads", "n_heads_kv", "n_tokens", "d_k", "d_v"),
        ("k", _F), ("v", _F), ("image_mask", _U8),
        ("n_queries", c.c_int32), ("q", _F), ("column_sums", _F),
        ("settings", _D), ("user_data", c.c_void_p),
    ]  # fmt: skip


class _AllocateInput(c.Structure):
    _fields_ = [
        *_ints("n_layers", "n_rows", "n_tokens"),
        ("n_heads_kv", _I), ("scores", _F), ("image_mask", _U8),
        *_ints("budget", "recent"),
        ("settings", _D), ("user_data", c.c_void_p),
    ]  # fmt: skip


class _ReduceInput(c.Structure):
    _fields_ = [
        *_ints("layer", "n_layers", "head", "n_tokens", "d_k", "d_v"),
        ("k", _F), ("v", _F), ("kept", _I),
        *_ints("n_kept", "sinks", "recent"),
        ("settings", _D), ("user_data", c.c_void_p),
    ]  # fmt: skip


_SCORE = c.CFUNCTYPE(c.c_int, c.POINTER(_ScoreInput), _F, c.POINTER(Error))
_ALLOCATE = c.CFUNCTYPE(c.c_int, c.POINTER(_AllocateInput), _I, c.POINTER(Error))
_REDUCE = c.CFUNCTYPE(c.c_int, c.POINTER(_ReduceInput), _F, _F, c.POINTER(Error))
_HEAD: list[tuple[str, Any]] = [
    ("struct_size", c.c_size_t), ("name", c.c_char_p), ("summary", c.c_char_p),
    ("settings", c.POINTER(Setting)), ("n_settings", c.c_int32),
]  # fmt: skip


class _Scorer(c.Structure):
    _fields_ = [
        *_HEAD, *_ints("n_queries", "recent"), ("column_sums", c.c_bool), ("thread_safe", c.c_bool),
        ("call", _SCORE), ("user_data", c.c_void_p),
    ]  # fmt: skip


class _Allocator(c.Structure):
    _fields_ = [*_HEAD, ("call", _ALLOCATE), ("user_data", c.c_void_p)]


class _Reducer(c.Structure):
    _fields_ = [*_HEAD, ("thread_safe", c.c_bool), ("call", _REDUCE), ("user_data", c.c_void_p)]


class _Plugin(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("scorers", c.POINTER(_Scorer)), ("n_scorers", c.c_int32),
        ("allocators", c.POINTER(_Allocator)), ("n_allocators", c.c_int32),
        ("reducers", c.POINTER(_Reducer)), ("n_reducers", c.c_int32),
    ]  # fmt: skip


_STRUCTS = {"scorer": (_Scorer, _SCORE), "allocator": (_Allocator, _ALLOCATE), "reducer": (_Reducer, _REDUCE)}


# ------------------------------------------------------------------------------------------------------------
# Python functions that C calls


def _copy(pointer: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A copy: a plugin may keep what it was shown, C frees it."""
    return np.ctypeslib.as_array(pointer, shape).copy()


class OwnStages:
    """The members of a plan that come from plugins, as structs for kvedge_plan_add_*.

    Must live as long as anything in C has the plan. A callback cannot raise through C: what it raised waits here.
    """

    def __init__(self, plan: Plan) -> None:
        self.structs: dict[str, c.Structure] = {}  # by stage
        self.unset: set[str] = set()  # stages whose settings C does not know
        self._failure: BaseException | None = None
        for stage in table.STAGES:
            plugin = table.get(stage, getattr(plan, stage))
            if plugin is None:
                continue
            if plugin.native is not None:
                self.structs[stage] = plugin.native
                continue
            self.unset.add(stage)
            self.structs[stage] = self._struct(stage, plugin, plan.settings(stage))

    def _struct(self, stage: str, plugin: table.Plugin, settings: base.Settings) -> c.Structure:
        kind, prototype = _STRUCTS[stage]
        run = {"scorer": _score, "allocator": _allocate, "reducer": _reduce}[stage]

        def call(given: Any, *others: Any) -> int:
            try:
                run(plugin.member, settings, given.contents, *others[:-1])
            except BaseException as error:  # nothing may be thrown through C; `explained` raises it again
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
        """Where C reports that a stage failed, raises what the stage raised."""
        try:
            yield
        except PluginError:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure from failure.__cause__
            raise


def _score(member: base.Scorer, settings: base.Settings, given: _ScoreInput, out: Any) -> None:
    heads, n_tokens = given.n_heads_kv, given.n_tokens
    queries = np.zeros((given.n_heads, 0, given.d_k), dtype=np.float32)
    if given.q:
        queries = _copy(given.q, (given.n_queries, given.n_heads, given.d_k)).swapaxes(0, 1)
    layer = base.Layer(
        queries,
        _copy(given.k, (heads, n_tokens, given.d_k)),
        _copy(given.v, (heads, n_tokens, given.d_v)),
        _copy(given.image_mask, (n_tokens,)).astype(bool),
        given.layer,
        given.n_layers,
        _copy(given.column_sums, (heads, n_tokens)) if given.column_sums else None,
    )
    np.ctypeslib.as_array(out, (heads, n_tokens))[:] = member.score(layer, settings)


def _allocate(member: base.Allocator, settings: base.Settings, given: _AllocateInput, out: Any) -> None:
    heads = given.n_heads_kv[: given.n_layers]
    if len(set(heads)) != 1:
        raise PluginError(f"allocator '{member.name}' cannot be used: the layers of this model differ in KV heads")
    shape = (given.n_layers, heads[0])
    scores = _copy(given.scores, (*shape, given.n_tokens)).astype(np.float64)
    mask = _copy(given.image_mask, (given.n_tokens,)).astype(bool)
    counts = member.allocate(base.Prompt(scores, mask, given.budget, given.recent), settings)
    np.ctypeslib.as_array(out, shape)[:] = counts


def _reduce(member: base.Reducer, settings: base.Settings, given: _ReduceInput, k: Any, v: Any) -> None:
    index = np.arange(given.n_tokens)
    head = base.Head(
        _copy(given.k, (given.n_tokens, given.d_k)),
        _copy(given.v, (given.n_tokens, given.d_v)),
        _copy(given.kept, (given.n_kept,)),
        (index < given.sinks) | (index >= given.n_tokens - given.recent),
        given.layer,
        given.n_layers,
        given.head,
    )
    rows = member.reduce(head, settings)
    for to, width, values in ((k, given.d_k, rows[0]), (v, given.d_v, rows[1])):
        with np.errstate(over="ignore"):
            np.ctypeslib.as_array(to, (given.n_kept, width))[:] = values


# ------------------------------------------------------------------------------------------------------------
# C functions that Python calls


def load_library(path: Path) -> list[table.Plugin]:
    """The members that a shared library exports by kvedge_plugin_v1. Raises PluginError."""
    try:
        library = c.CDLL(str(path.resolve()))
    except OSError as error:
        raise PluginError(f"plugin {path} cannot be loaded: {error}") from None
    try:
        entry = getattr(library, PLUGIN_SYMBOL)
    except AttributeError:
        raise PluginError(f"plugin {path} exports no {PLUGIN_SYMBOL}; see kvedge.h") from None
    entry.restype = c.POINTER(_Plugin)
    found = entry()
    if not found or found.contents.struct_size != c.sizeof(_Plugin):
        raise PluginError(f"plugin {path} was built for another kvedge.h: {PLUGIN_SYMBOL} returns no table that fits")
    out = []
    for stage, (kind, _) in _STRUCTS.items():
        for i in range(getattr(found.contents, f"n_{stage}s")):
            struct = getattr(found.contents, f"{stage}s")[i]
            if struct.struct_size != c.sizeof(kind) or not struct.call:
                raise PluginError(f"plugin {path}: {stage} {i} has no function, or its struct_size is not set")
            out.append(_native_member(stage, struct, path.name))
    return out


def _native_member(stage: str, struct: Any, origin: str) -> table.Plugin:
    name = text(struct.name)
    table.check_name(stage, name, origin)
    summary = text(struct.summary) or "no description"
    params = tuple(_param(struct.settings[i], origin) for i in range(struct.n_settings))
    if stage == "allocator":
        allocate = calling.checked_allocator(name, _NativeCall(struct, params, _run_allocate))
        return table.Plugin(base.Allocator(name, summary, origin, allocate, params), origin, native=struct)
    if stage == "reducer":
        reduce = calling.checked_reducer(name, _NativeCall(struct, params, _run_reduce))
        return table.Plugin(base.Reducer(name, summary, origin, reduce, params, merges=True), origin, native=struct)
    n_queries, recent = struct.n_queries, struct.recent
    member = base.Scorer(
        name,
        summary,
        origin,
        calling.checked_scorer(name, _NativeCall(struct, params, _run_score), lambda _: n_queries, struct.column_sums),
        params,
        auto_recent=lambda kept, even, _: min(kept // 2, recent),
    )
    return table.Plugin(member, origin, lambda _: n_queries, lambda _: recent, struct.column_sums, struct)


def _param(s: Setting, origin: str) -> base.Param:
    try:
        return base.Param.declared(s.declared)
    except KvedgeError as error:
        raise PluginError(f"{origin}: setting '{text(s.name)}' does not allow its own fallback: {error}") from None


class _NativeCall:
    """A C callback as a function on arrays, for the NumPy engine."""

    def __init__(self, struct: Any, params: tuple[base.Param, ...], run: Callable[..., Any]) -> None:
        self._struct, self._params, self._run = struct, params, run

    def __call__(self, given: Any, settings: base.Settings) -> Any:
        numbers = [p.number(settings[p.name]) for p in self._params]
        values = (c.c_double * max(1, len(numbers)))(*numbers)
        return self._run(self._struct, given, c.cast(values, _D))


def _pointer(x: np.ndarray, kind: Any) -> Any:
    return x.ctypes.data_as(kind)


def _c_call(struct: Any, given: c.Structure, *out: Any) -> None:
    error = Error()
    given.user_data = struct.user_data
    status = struct.call(c.byref(given), *out, c.byref(error))
    if status != 0:
        raise UsageError(error.text or f"status {status}, and nothing said")


def _run_score(struct: Any, layer: base.Layer, settings: Any) -> np.ndarray:
    heads, n_tokens, d_k = layer.k.shape
    k, v, q = (np.ascontiguousarray(x, np.float32) for x in (layer.k, layer.v, layer.q.swapaxes(0, 1)))
    mask = layer.image_mask.astype(np.uint8)
    given = _ScoreInput(layer.index, layer.n_layers, q.shape[1], heads, n_tokens, d_k, v.shape[2],
                        _pointer(k, _F), _pointer(v, _F), _pointer(mask, _U8), len(q), settings=settings)  # fmt: skip
    if len(q):
        given.q = _pointer(q, _F)
    if layer.column_sums is not None:
        sums = np.ascontiguousarray(layer.column_sums, np.float32)
        given.column_sums = _pointer(sums, _F)
    out = np.zeros((heads, n_tokens), np.float32)
    _c_call(struct, given, _pointer(out, _F))
    return out


def _run_allocate(struct: Any, prompt: base.Prompt, settings: Any) -> np.ndarray:
    n_layers, n_heads, n_tokens = prompt.scores.shape
    heads, scores = np.full(n_layers, n_heads, np.int32), np.ascontiguousarray(prompt.scores, np.float32)
    mask, counts = prompt.image_mask.astype(np.uint8), np.zeros((n_layers, n_heads), np.int32)
    given = _AllocateInput(n_layers, n_layers * n_heads, n_tokens, _pointer(heads, _I), _pointer(scores, _F),
                           _pointer(mask, _U8), prompt.budget, prompt.recent, settings)  # fmt: skip
    _c_call(struct, given, _pointer(counts, _I))
    return counts


def _run_reduce(struct: Any, head: base.Head, settings: Any) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.ascontiguousarray(head.k, np.float32), np.ascontiguousarray(head.v, np.float32)
    kept = np.ascontiguousarray(head.kept, np.int32)
    sinks, recent = int(np.argmin(head.protected)), int(np.argmin(head.protected[::-1]))
    given = _ReduceInput(head.layer, head.n_layers, head.index, *k.shape, v.shape[1], _pointer(k, _F), _pointer(v, _F),
                         _pointer(kept, _I), len(kept), sinks, recent, settings)  # fmt: skip
    out = k[kept], v[kept]
    _c_call(struct, given, *(_pointer(rows, _F) for rows in out))
    return out
