"""Loads stages from a shared library. Python and libkvedge call the C functions of the library.

libkvedge is not needed: the NumPy engine can run the members of a library without it.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pykvedge.errors import KvedgeError, PluginError, UsageError
from pykvedge.native.abi import Error, Setting, text
from pykvedge.native.stage_structs import DOUBLES, STRUCTS, AllocateInput, Plugin, ReduceInput, ScoreInput
from pykvedge.plans.plugins import calling, table
from pykvedge.reference.stages import base

PLUGIN_SYMBOL = "kvedge_plugin_v1"


def load_library(path: Path) -> list[table.Plugin]:
    """Returns the members that a shared library exports by kvedge_plugin_v1. Raises PluginError."""
    try:
        library = c.CDLL(str(path.resolve()))
    except OSError as error:
        raise PluginError(f"plugin {path} cannot be loaded: {error}") from None
    try:
        entry = getattr(library, PLUGIN_SYMBOL)
    except AttributeError:
        raise PluginError(f"plugin {path} does not export the function {PLUGIN_SYMBOL}; see kvedge.h") from None
    entry.restype = c.POINTER(Plugin)
    found = entry()
    plugin = _own_copy(Plugin, c.cast(found, c.c_void_p).value)
    if plugin is None:
        raise PluginError(
            f"plugin {path} was built with another kvedge.h, because the table of {PLUGIN_SYMBOL} does "
            f"not fit; build the plugin again"
        )
    out = []
    for stage, (kind, _) in STRUCTS.items():
        at = c.cast(getattr(plugin, f"{stage}s"), c.c_void_p).value
        for i in range(getattr(plugin, f"n_{stage}s")):
            struct = _own_copy(kind, at)
            if at is None or struct is None or not struct.call:
                raise PluginError(f"plugin {path}: {stage} {i} has no function, or its struct_size does not fit")
            at += c.c_size_t.from_address(at).value
            out.append(_native_member(stage, struct, path.name))
    return out


def _own_copy(kind: type[c.Structure], address: int | None) -> Any:
    """Returns a copy of the struct at an address, or None if the struct is too small or has unknown fields set.

    kvedge.h: a struct with a struct_size may come from a newer header; then it is larger, with zeros at its end.
    """
    if not address:
        return None
    known, size = c.sizeof(kind), c.c_size_t.from_address(address).value
    last = getattr(kind, "n_reducers" if kind is Plugin else "user_data")  # last field in the first version
    if size < last.offset + last.size or any(c.string_at(address + known, max(size - known, 0))):
        return None
    own = kind.from_buffer_copy(c.string_at(address, min(size, known)).ljust(known, b"\0"))
    own.struct_size = known
    return own


def _native_member(stage: str, struct: Any, origin: str) -> table.Plugin:
    name = text(struct.name)
    table.check_name(stage, name, origin)
    summary = text(struct.summary) or "no description"
    params = tuple(_param(struct.settings[i], origin) for i in range(struct.n_settings))
    about = name, summary, origin
    if stage == "allocator":
        allocate = calling.checked_allocator(name, _NativeCall(struct, params, _run_allocate))
        return table.Plugin(base.Allocator(*about, allocate, params=params), origin, native=struct)
    if stage == "reducer":
        reduce = calling.checked_reducer(name, _NativeCall(struct, params, _run_reduce))
        return table.Plugin(base.Reducer(*about, reduce, params=params), origin, native=struct)
    n_queries, recent, sums = struct.n_queries, struct.recent, struct.column_sums
    score = calling.checked_scorer(name, _NativeCall(struct, params, _run_score), lambda _: n_queries, sums)
    member = base.Scorer(*about, score, params=params, auto_recent=lambda kept, even, _: min(kept // 2, recent))
    return table.Plugin(member, origin, lambda _: n_queries, lambda _: recent, sums, struct)


def _param(s: Setting, origin: str) -> base.Param:
    try:
        return base.Param.declared(s)
    except KvedgeError as error:
        raise PluginError(f"{origin}: the default of setting '{text(s.name)}' is not allowed: {error}") from None


class _NativeCall:
    """Calls a C callback with arrays, for the NumPy engine."""

    def __init__(self, struct: Any, params: tuple[base.Param, ...], run: Callable[..., Any]) -> None:
        self._struct, self._params, self._run = struct, params, run

    def __call__(self, given: Any, settings: base.Settings) -> Any:
        numbers = [p.number(settings[p.name]) for p in self._params]
        values = (c.c_double * max(1, len(numbers)))(*numbers)
        return self._run(self._struct, given, c.cast(values, DOUBLES))


def _pointer(x: np.ndarray) -> Any:
    return x.ctypes.data_as(c.POINTER(np.ctypeslib.as_ctypes_type(x.dtype)))


def _c_call(struct: Any, given: c.Structure, *out: Any) -> None:
    error = Error()
    given.user_data = struct.user_data
    status = struct.call(c.byref(given), *out, c.byref(error))
    if status != 0:
        raise UsageError(error.text or f"status {status} without a message")


def _run_score(struct: Any, layer: base.Layer, settings: Any) -> np.ndarray:
    heads, n_tokens, d_k = layer.k.shape
    k, v, q = (np.ascontiguousarray(x, np.float32) for x in (layer.k, layer.v, layer.q.swapaxes(0, 1)))
    mask = layer.image_mask.astype(np.uint8)
    given = ScoreInput(layer.index, layer.n_layers, q.shape[1], heads, n_tokens, d_k, v.shape[2], _pointer(k),
                       _pointer(v), _pointer(mask), len(q), settings=settings)  # fmt: skip
    if len(q):
        given.q = _pointer(q)
    if layer.column_sums is not None:
        sums = np.ascontiguousarray(layer.column_sums, np.float32)
        given.column_sums = _pointer(sums)
    out = np.zeros((heads, n_tokens), np.float32)
    _c_call(struct, given, _pointer(out))
    return out


def _run_allocate(struct: Any, prompt: base.Prompt, settings: Any) -> np.ndarray:
    n_layers, n_heads, n_tokens = prompt.scores.shape
    heads, scores = np.full(n_layers, n_heads, np.int32), np.ascontiguousarray(prompt.scores, np.float32)
    mask, counts = prompt.image_mask.astype(np.uint8), np.zeros((n_layers, n_heads), np.int32)
    given = AllocateInput(n_layers, n_layers * n_heads, n_tokens, _pointer(heads), _pointer(scores),
                           _pointer(mask), prompt.budget, prompt.recent, settings)  # fmt: skip
    _c_call(struct, given, _pointer(counts))
    return counts


def _run_reduce(struct: Any, head: base.Head, settings: Any) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.ascontiguousarray(head.k, np.float32), np.ascontiguousarray(head.v, np.float32)
    kept = np.ascontiguousarray(head.kept, np.int32)
    sinks, recent = int(np.argmin(head.protected)), int(np.argmin(head.protected[::-1]))
    given = ReduceInput(head.layer, head.n_layers, head.index, *k.shape, v.shape[1], _pointer(k), _pointer(v),
                        _pointer(kept), len(kept), sinks, recent, settings)  # fmt: skip
    out = k[kept], v[kept]
    _c_call(struct, given, *(_pointer(rows) for rows in out))
    return out
