"""Declares the structs and prototypes of kvedge.h for ctypes. The module `calls` loads the library."""

from __future__ import annotations

import ctypes as c
from typing import Any

from pykvedge.system import shown

ABI_VERSION = 1
STAGE_NUMBER = {"scorer": 0, "allocator": 1, "reducer": 2, "decode": 3, "pruner": 4}


def text(value: bytes | None) -> str:
    """Decodes a char * of the library or of a plugin."""
    return (value or b"").decode("utf-8", "replace")


class Facts(c.Structure):
    """kvedge_stage_facts."""

    _fields_ = [
        ("struct_size", c.c_size_t), ("kept", c.c_int32), ("even", c.c_int32), ("profile", c.c_char_p),
        *((name, c.c_int32) for name in ("whole_up_to", "recent", "reserved")),
        *((name, c.c_bool) for name in ("does_without", "sinks_first", "attends", "projects", "queries")),
    ]  # fmt: skip


class Error(c.Structure):
    """kvedge_error."""

    _fields_ = [("status", c.c_int), ("message", c.c_char * 500)]

    @property
    def text(self) -> str:
        return text(self.message)


class Setting(c.Structure):
    """kvedge_setting. The fallback of a word setting is an index of choices. step 0: any number."""

    _fields_ = [
        ("name", c.c_char_p), ("help", c.c_char_p),
        *((name, c.c_double) for name in ("fallback", "lowest", "highest")),
        ("step", c.c_int32), ("choices", c.c_char_p),
    ]  # fmt: skip


class Options(c.Structure):
    """kvedge_options."""

    _fields_ = [
        ("struct_size", c.c_size_t), ("type", c.c_int), ("n_threads", c.c_int32), ("auto_compress", c.c_bool),
        ("type_k", c.c_int), ("type_v", c.c_int), ("unused", c.c_int32), ("devices", c.c_int), ("rotate", c.c_int),
    ]  # fmt: skip


class Stats(c.Structure):
    """kvedge_stats. Bytes are sizes of allocated buffers, times are microseconds."""

    _fields_ = [
        ("struct_size", c.c_size_t),
        *((name, c.c_int32) for name in (
            "n_layers", "n_heads_kv", "n_tokens", "n_image_tokens", "n_compressions", "n_pending")),
        *((name, c.c_uint64) for name in (
            "bytes", "index_bytes", "score_bytes", "before_bytes", "after_bytes", "peak_bytes")),
        ("compress_us", c.c_int64),
        ("device_bytes", c.c_uint64),
        ("n_unfitted", c.c_int32), ("n_scant", c.c_int32),
        *((f"device_{name}", c.c_uint64) for name in ("fetched_bytes", "sent_bytes")),
        *((f"device_{name}", c.c_int64) for name in (
            "operations", "measure_us", "choose_us", "gather_us", "merge_us", "upload_us")),
        ("device_compressed", c.c_int32), ("whole_rounded", c.c_int32),
        ("whole_bytes", c.c_uint64), ("whole_file_bytes", c.c_uint64),
    ]  # fmt: skip

    def __repr__(self) -> str:
        size = f"{self.before_bytes / 2**20:.2f} -> {self.after_bytes / 2**20:.2f} MiB"
        did = f"compressions: {self.n_compressions}, the last {size} in {self.compress_us / 1000:.1f} ms"
        return (
            f"<Stats {self.n_tokens} tokens ({self.n_image_tokens} image, {self.n_pending} pending), "
            f"KV {self.bytes / 2**20:.2f} MiB | {did if self.n_compressions else 'not compressed'}>"
        )

    def _repr_html_(self) -> str:
        names = [name for name, _ in self._fields_ if name != "struct_size"]
        return shown.table("kvedge_stats", {name: getattr(self, name) for name in names})


KEEP_PLACES = {"": 0, "ram": 1, "disk": 2}  # kvedge_keep_place


class Saved(c.Structure):
    """kvedge_saved."""

    _fields_ = [
        ("struct_size", c.c_size_t), ("file_bytes", c.c_uint64), ("note_bytes", c.c_uint64), ("model", c.c_char * 256),
        ("whole", c.c_bool),
    ]  # fmt: skip


class GivenArrays(c.Structure):
    """kvedge_arrays."""

    _fields_ = [
        *((name, c.c_int32) for name in ("n_layers", "n_heads", "n_heads_kv", "n_tokens", "head_size")),
        *((name, c.c_void_p) for name in ("q", "k", "v", "image_mask")),
    ]


class ReplayChunk(c.Structure):
    """A chunk of a second pass: repeats the prompt's tokens [first, last), and has n_tokens with its request.

    sinks: number of first tokens of the prompt, such as a chat template's, that every chunk's softmax includes and that
    are kept before all others. Has the layout of kvedge_replay_chunk.
    """

    _fields_ = [(name, c.c_int32) for name in ("first", "last", "sinks", "n_tokens")]

    def __init__(self, first: int, last: int, n_tokens: int, sinks: int = 0) -> None:
        super().__init__(first, last, sinks, n_tokens)

    def __repr__(self) -> str:
        return f"ReplayChunk({self.first}, {self.last}, {self.n_tokens}, {self.sinks})"


class GivenReplay(c.Structure):
    """kvedge_replay."""

    _fields_ = [
        ("n_tokens", c.c_int32), ("n_chunks", c.c_int32), ("q", c.c_void_p), ("k", c.c_void_p),
        ("chunks", c.POINTER(ReplayChunk)),
    ]  # fmt: skip


class GivenImage(c.Structure):
    """kvedge_image."""

    _fields_ = [
        ("struct_size", c.c_size_t), ("rows", c.c_void_p),
        *((name, c.c_int32) for name in ("n_rows", "width", "down", "across")),
    ]  # fmt: skip


ROTATE_NUMBER = {"auto": 0, "off": 1, "on": 2}  # kvedge_rotate
DEVICES_AUTO, DEVICES_NONE, DEVICES_ALL = 0, 1, 2  # kvedge_devices

_P = c.c_void_p
_I = c.c_int32
_ERR = c.c_void_p  # an Error
_OUT = c.POINTER(c.c_void_p)
Look = c.CFUNCTYPE(c.c_bool, _I, _P)  # kvedge_encoder_look
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "version": (c.c_char_p, []),
    "abi_version": (_I, []),
    "simd": (c.c_char_p, []),
    "kernels": (c.c_char_p, [_I]),
    "check_kernels": (c.c_int, [c.c_char_p, _ERR]),
    "load_backends": (c.c_int, [_ERR]),
    "stage_count": (_I, [c.c_int]),
    "stage_name": (c.c_char_p, [c.c_int, _I]),
    "stage_setting": (c.POINTER(Setting), [c.c_int, c.c_char_p, _I]),
    "stage_get_facts": (c.c_int, [c.c_int, c.c_char_p, c.POINTER(c.c_double), _I, c.POINTER(Facts), _ERR]),
    "type_name": (c.c_char_p, [_I]),
    "type_bytes": (_I, [_I]),
    "plan_create": (c.c_int, [_OUT, _ERR]),
    "plan_free": (None, [_P]),
    "plan_set": (c.c_int, [_P, c.c_char_p, c.c_char_p, _ERR]),
    "plan_set_profile": (c.c_int, [_P, c.c_int, _P, _P, _I, _I, _ERR]),
    "plan_set_rotation": (c.c_int, [_P, c.c_int, _P, _I, _ERR]),
    "plan_set_projection": (c.c_int, [_P, _P, _I, _I, _I, _I, _ERR]),
    "plan_check": (c.c_int, [_P, _ERR]),
    "plan_image_tokens": (_I, [_P, _I]),
    "prune": (c.c_int, [_P, c.POINTER(GivenImage), _I, _P, _P, c.POINTER(_I), _ERR]),
    "plan_budget": (_I, [_P, _I]),
    "plan_later_budget": (_I, [_P, _I]),
    "plan_check_stream": (c.c_int, [_P, _ERR]),
    "plan_score_bytes": (c.c_uint64, [_P, _I, _I, _I, _I]),
    **{f"plan_add_{stage}": (c.c_int, [_P, _P, _ERR]) for stage in ("scorer", "allocator", "reducer")},
    "options_init": (c.c_int, [c.POINTER(Options), c.c_size_t, _ERR]),
    "attach": (c.c_int, [_P, _P, c.POINTER(Options), _OUT, _ERR]),
    "detach": (None, [_P]),
    "set_plan": (c.c_int, [_P, _P, _ERR]),
    "set_sequence_plan": (c.c_int, [_P, _I, _P, _ERR]),
    "set_auto_compress": (c.c_int, [_P, c.c_bool, _ERR]),
    "keep": (c.c_int, [_P, c.c_int, c.c_char_p, c.c_uint64, _ERR]),
    "limit_tokens": (c.c_int, [_P, _I, _I, _I, _I, _ERR]),
    "choose_again": (c.c_int, [_P, _I, _ERR]),
    "keep_saved": (c.c_int, [_P, c.c_bool, _ERR]),
    "keep_problem": (c.c_char_p, [_P, _I]),
    "plan_check_bounded": (c.c_int, [_P, c.c_int, c.c_int, _ERR]),
    "expect": (c.c_int, [_P, _I, _I, _ERR]),
    "bound_prompt": (c.c_int, [_P, _I, _P, _I, _ERR]),
    "bounded_layers": (_I, [_P, _I]),
    "compress": (c.c_int, [_P, _I, _ERR]),
    "compress_stream": (c.c_int, [_P, _I, _ERR]),
    "cells": (_I, [_P, _I]),
    "verify_begin": (c.c_int, [_P, _I, _I, _ERR]),
    "verify_whole": (c.c_int, [_P, _I, _I, _ERR]),
    "verify_end": (c.c_int, [_P, _I, _I, _ERR]),
    "verify_room": (_I, [_P, _I]),
    "renumber": (c.c_int, [_P, _I, _I, c.POINTER(_I), _ERR]),
    "take_error": (c.c_int, [_P, _ERR]),
    "get_stats": (c.c_int, [_P, _I, c.POINTER(Stats), _ERR]),
    "layer_id": (_I, [_P, _I]),
    "layer_device": (c.c_char_p, [_P, _I]),
    "device_problem": (c.c_char_p, [_P, _I]),
    "head_length": (_I, [_P, _I, _I, _I]),
    "query_heads": (_I, [_P, _I]),
    "watch": (c.c_int, [_P, c.c_bool, _ERR]),
    "attention": (c.c_int, [_P, _I, _I, _I, c.POINTER(c.c_float), _I, _ERR]),
    "head_tokens": (c.c_int, [_P, _I, _I, _I, c.POINTER(_I), _I, _ERR]),
    "layer_shape": (c.c_int, [_P, _I, *[c.POINTER(_I)] * 4, _ERR]),
    "head_rows": (c.c_int, [_P, _I, _I, _I, c.POINTER(c.c_float), c.POINTER(c.c_float), _I, _ERR]),
    "head_biases": (c.c_int, [_P, _I, _I, _I, c.POINTER(c.c_float), _I, _ERR]),
    "pending_scores": (c.c_int, [_P, _I, _I, c.POINTER(c.c_float), _I, _ERR]),
    "save": (c.c_int, [_P, _I, c.c_char_p, c.c_char_p, c.c_char_p, c.c_size_t, _ERR]),
    "load": (c.c_int, [_P, _I, c.c_char_p, c.c_char_p, _ERR]),
    "pack": (c.c_int, [_P, _I, c.c_char_p, _P, c.POINTER(c.c_size_t), _ERR]),
    "unpack": (c.c_int, [_P, _I, c.c_char_p, _P, c.c_size_t, _ERR]),
    "read_saved": (c.c_int, [c.c_char_p, c.POINTER(Saved), _P, c.c_size_t, _ERR]),
    "last_words": (c.c_int, [c.c_char_p, c.c_char_p, _I, _ERR]),
    "encoder_create": (c.c_int, [_OUT, _ERR]),
    "encoder_free": (None, [_P]),
    "encoder_set_look": (None, [_P, Look, _P]),
    "encoder_eval": (c.c_bool, [_P, c.c_bool, _P]),
    "encoder_release": (c.c_uint64, [_P]),
    "compress_arrays_replayed": (
        c.c_int,
        [_P, c.POINTER(GivenArrays), c.POINTER(GivenReplay), c.POINTER(Options), _OUT, _ERR],
    ),
    "plan_replays": (c.c_bool, [_P]),
    "replay_begin": (c.c_int, [_P, _I, c.POINTER(ReplayChunk), _ERR]),
    "replay_end": (c.c_int, [_P, _I, _ERR]),
    "stream_arrays": (c.c_int, [_P, c.POINTER(GivenArrays), c.c_int, c.c_int, _I, _I, _OUT, _ERR]),
    "result_free": (None, [_P]),
    "result_length": (_I, [_P, _I, _I]),
    "result_kept": (c.POINTER(_I), [_P, _I, _I]),
    "result_k": (c.POINTER(c.c_float), [_P, _I, _I]),
    "result_v": (c.POINTER(c.c_float), [_P, _I, _I]),
    "result_biases": (c.POINTER(c.c_float), [_P, _I, _I]),
    "result_scores": (c.POINTER(c.c_float), [_P, _I, _I]),
    "result_attention": (c.POINTER(c.c_float), [_P, _I]),
}
