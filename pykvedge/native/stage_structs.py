"""Declares kvedge.h's structs of stages for ctypes, for stages that plugins define."""

from __future__ import annotations

import ctypes as c
from typing import Any

from pykvedge.native.abi import Error, Setting

FLOATS, INTS, DOUBLES, BYTES = (c.POINTER(t) for t in (c.c_float, c.c_int32, c.c_double, c.c_uint8))


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, c.c_int32) for name in names]


class ScoreInput(c.Structure):
    """kvedge_score_input."""

    _fields_ = [
        *_ints("layer", "n_layers", "n_heads", "n_heads_kv", "n_tokens", "d_k", "d_v"),
        ("k", FLOATS), ("v", FLOATS), ("image_mask", BYTES),
        ("n_queries", c.c_int32), ("q", FLOATS), ("column_sums", FLOATS),
        ("settings", DOUBLES), ("user_data", c.c_void_p),
    ]  # fmt: skip


class AllocateInput(c.Structure):
    """kvedge_allocate_input."""

    _fields_ = [
        *_ints("n_layers", "n_rows", "n_tokens"),
        ("n_heads_kv", INTS), ("scores", FLOATS), ("image_mask", BYTES),
        *_ints("budget", "recent"),
        ("settings", DOUBLES), ("user_data", c.c_void_p),
    ]  # fmt: skip


class ReduceInput(c.Structure):
    """kvedge_reduce_input."""

    _fields_ = [
        *_ints("layer", "n_layers", "head", "n_tokens", "d_k", "d_v"),
        ("k", FLOATS), ("v", FLOATS), ("kept", INTS),
        *_ints("n_kept", "sinks", "recent"),
        ("settings", DOUBLES), ("user_data", c.c_void_p),
    ]  # fmt: skip


SCORE = c.CFUNCTYPE(c.c_int, c.POINTER(ScoreInput), FLOATS, c.POINTER(Error))
ALLOCATE = c.CFUNCTYPE(c.c_int, c.POINTER(AllocateInput), INTS, c.POINTER(Error))
REDUCE = c.CFUNCTYPE(c.c_int, c.POINTER(ReduceInput), FLOATS, FLOATS, c.POINTER(Error))
_HEAD: list[tuple[str, Any]] = [
    ("struct_size", c.c_size_t), ("name", c.c_char_p), ("summary", c.c_char_p),
    ("settings", c.POINTER(Setting)), ("n_settings", c.c_int32),
]  # fmt: skip


class Scorer(c.Structure):
    """kvedge_custom_scorer."""

    _fields_ = [
        *_HEAD, *_ints("n_queries", "recent"), ("column_sums", c.c_bool), ("thread_safe", c.c_bool),
        ("call", SCORE), ("user_data", c.c_void_p),
    ]  # fmt: skip


class Allocator(c.Structure):
    """kvedge_custom_allocator."""

    _fields_ = [*_HEAD, ("call", ALLOCATE), ("user_data", c.c_void_p)]


class Reducer(c.Structure):
    """kvedge_custom_reducer."""

    _fields_ = [*_HEAD, ("thread_safe", c.c_bool), ("call", REDUCE), ("user_data", c.c_void_p)]


class Plugin(c.Structure):
    """kvedge_plugin."""

    _fields_ = [
        ("struct_size", c.c_size_t),
        ("scorers", c.POINTER(Scorer)), ("n_scorers", c.c_int32),
        ("allocators", c.POINTER(Allocator)), ("n_allocators", c.c_int32),
        ("reducers", c.POINTER(Reducer)), ("n_reducers", c.c_int32),
    ]  # fmt: skip


STRUCTS = {"scorer": (Scorer, SCORE), "allocator": (Allocator, ALLOCATE), "reducer": (Reducer, REDUCE)}
