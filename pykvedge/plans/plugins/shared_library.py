"""Stages that a shared library brings: C functions that Python calls, and that libkvedge is given as they are.

libkvedge is not needed: a library of stages can be loaded, and its members run by the NumPy engine, without it.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pykvedge.errors import KvedgeError, PluginError, UsageError
from pykvedge.native.abi import Error
from pykvedge.native.stage_structs import (
    BYTES,
    DOUBLES,
    FLOATS,
    INTS,
    STRUCTS,
    AllocateInput,
    Plugin,
    ReduceInput,
    ScoreInput,
    Setting,
)
from pykvedge.plans.plugins import calling, table
from pykvedge.plans.stages import base

PLUGIN_SYMBOL = "kvedge_plugin_v1"


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
    entry.restype = c.POINTER(Plugin)
    found = entry()
    if not found or found.contents.struct_size != c.sizeof(Plugin):
        raise PluginError(f"plugin {path} was built for another kvedge.h: {PLUGIN_SYMBOL} returns no table that fits")
    out = []
    for stage, (kind, _) in STRUCTS.items():
        for i in range(getattr(found.contents, f"n_{stage}s")):
            struct = getattr(found.contents, f"{stage}s")[i]
            if struct.struct_size != c.sizeof(kind) or not struct.call:
                raise PluginError(f"plugin {path}: {stage} {i} has no function, or its struct_size is not set")
            out.append(_native_member(stage, struct, path.name))
    return out


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def _native_member(stage: str, struct: Any, origin: str) -> table.Plugin:
    name = _text(struct.name)
    table.check_name(stage, name, origin)
    summary = _text(struct.summary) or "no description"
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
    name, words = _text(s.name), tuple(_text(s.choices).split(",")) if s.choices else ()
    try:
        if words:
            return base.Param(name, words[int(s.fallback)], _text(s.help), choices=words)
        default = int(s.fallback) if s.step else float(s.fallback)
        param = base.Param(name, default, _text(s.help), s.lowest, s.highest, step=max(1, s.step))
        param.check(default, name)
    except (IndexError, KvedgeError) as error:
        raise PluginError(f"{origin}: setting '{name}' does not allow its own fallback: {error}") from None
    return param


class _NativeCall:
    """A C callback as a function on arrays, for the NumPy engine."""

    def __init__(self, struct: Any, params: tuple[base.Param, ...], run: Callable[..., Any]) -> None:
        self._struct, self._params, self._run = struct, params, run

    def __call__(self, given: Any, settings: base.Settings) -> Any:
        numbers = [p.choices.index(settings[p.name]) if p.choices else settings[p.name] for p in self._params]
        values = (c.c_double * max(1, len(numbers)))(*map(float, numbers))
        return self._run(self._struct, given, c.cast(values, DOUBLES))


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
    given = ScoreInput(layer.index, layer.n_layers, q.shape[1], heads, n_tokens, d_k, v.shape[2],
                       _pointer(k, FLOATS), _pointer(v, FLOATS), _pointer(mask, BYTES), len(q),
                       settings=settings)  # fmt: skip
    if len(q):
        given.q = _pointer(q, FLOATS)
    if layer.column_sums is not None:
        sums = np.ascontiguousarray(layer.column_sums, np.float32)
        given.column_sums = _pointer(sums, FLOATS)
    out = np.zeros((heads, n_tokens), np.float32)
    _c_call(struct, given, _pointer(out, FLOATS))
    return out


def _run_allocate(struct: Any, prompt: base.Prompt, settings: Any) -> np.ndarray:
    n_layers, n_heads, n_tokens = prompt.scores.shape
    heads, scores = np.full(n_layers, n_heads, np.int32), np.ascontiguousarray(prompt.scores, np.float32)
    mask, counts = prompt.image_mask.astype(np.uint8), np.zeros((n_layers, n_heads), np.int32)
    given = AllocateInput(n_layers, n_layers * n_heads, n_tokens, _pointer(heads, INTS), _pointer(scores, FLOATS),
                           _pointer(mask, BYTES), prompt.budget, prompt.recent, settings)  # fmt: skip
    _c_call(struct, given, _pointer(counts, INTS))
    return counts


def _run_reduce(struct: Any, head: base.Head, settings: Any) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.ascontiguousarray(head.k, np.float32), np.ascontiguousarray(head.v, np.float32)
    kept = np.ascontiguousarray(head.kept, np.int32)
    sinks, recent = int(np.argmin(head.protected)), int(np.argmin(head.protected[::-1]))
    given = ReduceInput(head.layer, head.n_layers, head.index, *k.shape, v.shape[1], _pointer(k, FLOATS),
                        _pointer(v, FLOATS), _pointer(kept, INTS), len(kept), sinks, recent, settings)  # fmt: skip
    out = k[kept], v[kept]
    _c_call(struct, given, *(_pointer(rows, FLOATS) for rows in out))
    return out
