"""Makes libkvedge's plans from Plans, checks them, and applies them to plain arrays."""

from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Iterable, Mapping

import numpy as np

from pykvedge import errors
from pykvedge.library.plugin_stages import PluginStages
from pykvedge.native.abi import ROTATE_NUMBER, STAGE_NUMBER, GivenArrays, GivenReplay, Options, ReplayChunk
from pykvedge.native.calls import call, lib
from pykvedge.plans.plan import Plan
from pykvedge.reference.engine import Arrays
from pykvedge.reference.kvtypes import KvType
from pykvedge.reference.stages.base import ProfileTable, Result
from pykvedge.reference.stages.replay import Replay
from pykvedge.reference.stages.rotation import PAIRS


class NativePlan:
    """A kvedge_plan made from a Plan. Use a with statement."""

    def __init__(
        self, plan: Plan, profiles: Mapping[str, ProfileTable] | None = None, later_floor: int | None = None
    ) -> None:
        """profiles: for the stages that need one, by stage. later_floor: None: the library's default."""
        self.handle = c.c_void_p()
        self.plugins = PluginStages(plan)
        call("plan_create", c.byref(self.handle))
        try:
            for stage, struct in self.plugins.structs.items():
                call(f"plan_add_{stage}", self.handle, c.byref(struct))
            for key, value in plan.as_text().items():
                stage, _, setting = key.partition(".")
                if stage not in self.plugins.unknown and not (setting and stage in self.plugins.unset):
                    call("plan_set", self.handle, key.encode(), value.encode())
            if later_floor is not None:
                call("plan_set", self.handle, b"later_floor", str(later_floor).encode())
            for stage, profile in (profiles or {}).items():
                budgets, values = profile.budgets.ctypes.data if len(profile.budgets) else None, profile.values
                call("plan_set_profile", self.handle, STAGE_NUMBER[stage], values.ctypes.data, budgets, *values.shape)
            call("plan_check", self.handle)
        except errors.KvedgeError:
            lib().kvedge_plan_free(self.handle)
            raise

    def __enter__(self) -> NativePlan:
        return self

    def __exit__(self, *_: object) -> None:
        lib().kvedge_plan_free(self.handle)


def why_not_bounded(plan: Plan, kv_type: str | KvType = "f16") -> str:
    """Returns why prompts under a plan cannot be compressed layer by layer, or an empty string."""
    with NativePlan(plan) as native:
        try:
            call("plan_check_bounded", native.handle, *KvType.parse(kv_type).numbers)
        except errors.UnsupportedError as error:
            return str(error)
    return ""


def plan_budget(plan: Plan, n_tokens: int, later: bool = False, later_floor: int | None = None) -> int:
    """Returns the KV pairs per head that a plan keeps of a prompt, or (later) of a later message.

    later_floor: least tokens kept of a later message; None: the library's default.
    """
    with NativePlan(plan, later_floor=later_floor) as native:
        asked = lib().kvedge_plan_later_budget if later else lib().kvedge_plan_budget
        return asked(native.handle, n_tokens)


def check_stream(plan: Plan) -> None:
    """Raises UsageError with the reason if a plan cannot compress a stream."""
    with NativePlan(plan) as native:
        try:
            call("plan_check_stream", native.handle)
        except errors.UnsupportedError as error:
            raise errors.UsageError(str(error)) from None


def score_bytes(plan: Plan, n_tokens: int, layers: Iterable[tuple[int, int, int]]) -> int:
    """Returns the bytes beside keys and values while a prompt is read and compressed. layers: (H, Hkv, d_k) each."""
    with NativePlan(plan) as native:
        of_layer = functools.cache(functools.partial(lib().kvedge_plan_score_bytes, native.handle, n_tokens))
        return sum(of_layer(*shape) for shape in layers)


@functools.lru_cache(64)  # a server asks for each request, nearly always about the same plan
def replays(plan: Plan) -> bool:
    """Returns whether the plan's scorer needs a second pass over the prompt (runtime/replay.py)."""
    with NativePlan(plan) as native:
        return bool(lib().kvedge_plan_replays(native.handle))


def options_of(kv_type: KvType) -> Options:
    """Returns a kvedge_options with the storage types and their rotation; other fields have defaults."""
    options = Options()
    call("options_init", c.byref(options), c.sizeof(options))
    options.type_k, options.type_v = kv_type.numbers
    options.rotate = ROTATE_NUMBER[kv_type.rotate]
    return options


def _second_pass(replay: Replay) -> GivenReplay:
    chunks = (ReplayChunk * len(replay.chunks))(*replay.chunks)
    at = replay.q.ctypes.data, replay.k.ctypes.data
    return GivenReplay(replay.q.shape[2], len(chunks), *at, chunks)


def compress_arrays(
    plan: Plan,
    arrays: Arrays,
    kv_type: KvType,
    threads: int,
    profiles: Mapping[str, ProfileTable] | None = None,
    step: int = 0,
) -> Result:
    """Calls kvedge_compress_arrays_replayed; with a step, kvedge_stream_arrays.

    step: tokens per step; 0: no stream. threads: 0: all cores, fewer for small arrays. profiles: by stage.
    """
    q, k, v, mask, rotation, projection, replay = arrays
    n_layers, n_heads_kv, n_tokens, size = k.shape
    second = None if replay is None else _second_pass(replay)
    given = GivenArrays(n_layers, q.shape[1], n_heads_kv, n_tokens, size, *(x.ctypes.data for x in (q, k, v, mask)))
    result = c.c_void_p()
    with NativePlan(plan, profiles) as native, native.plugins.explained():
        if rotation is not None:
            angles = rotation.angles
            call("plan_set_rotation", native.handle, PAIRS.index(rotation.pairs), angles.ctypes.data, len(angles))
        if projection is not None and plan.projects:
            call("plan_set_projection", native.handle, projection.ctypes.data, *projection.shape)
        if step:
            call("stream_arrays", native.handle, c.byref(given), *kv_type.numbers, step, threads, c.byref(result))
        else:
            options = options_of(kv_type)
            options.n_threads = threads
            again = second and c.byref(second)
            call("compress_arrays_replayed", native.handle, c.byref(given), again, c.byref(options), c.byref(result))
    library = lib()
    out = Result([], [], [], np.zeros((n_layers, n_heads_kv, 0 if step else n_tokens), dtype=np.float32))
    try:
        for i in range(n_layers):
            for column in (out.kept, out.k, out.v, out.bias):
                column.append([])
            for h in range(n_heads_kv):
                n = library.kvedge_result_length(result, i, h)
                at = (result, i, h)
                out.kept[i].append(np.ctypeslib.as_array(library.kvedge_result_kept(*at), (n,)).copy())
                out.k[i].append(np.ctypeslib.as_array(library.kvedge_result_k(*at), (n, size)).copy())
                out.v[i].append(np.ctypeslib.as_array(library.kvedge_result_v(*at), (n, size)).copy())
                biases = library.kvedge_result_biases(*at)
                bias = np.ctypeslib.as_array(biases, (n,)).copy() if biases else np.zeros(n, np.float32)
                out.bias[i].append(bias)
                if not step:
                    out.scores[i, h] = np.ctypeslib.as_array(library.kvedge_result_scores(*at), (n_tokens,))
    finally:
        library.kvedge_result_free(result)
    return out
