"""Applies a plan to plain arrays, without a model, for research and tests (`compress`)."""

from __future__ import annotations

import numbers
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pykvedge.errors import ArrayError, check_number, unknown
from pykvedge.plans.plan import Plan
from pykvedge.reference.kvtypes import GROUP, KvType
from pykvedge.reference.stages.base import Result
from pykvedge.system import signals

if TYPE_CHECKING:
    from typing import TypedDict

    import numpy as np
    from typing_extensions import Unpack

    from pykvedge.plans.profile import Given
    from pykvedge.reference.engine import Arrays
    from pykvedge.reference.stages.replay import Replay
    from pykvedge.reference.stages.rotation import Rotation

    class GivenOptions(TypedDict, total=False):
        """The keyword options of compress."""

        kv_type: str | KvType
        kv_rotate: str
        threads: int
        profile: Given
        stream: int
        rotation: Rotation | None
        projection: Any
        replay: Replay | None


ENGINES = ("native", "numpy")
_DEFAULTS: GivenOptions = {"kv_type": "f16", "kv_rotate": "auto", "threads": 0, "profile": None, "stream": 0,
                           "rotation": None, "projection": None, "replay": None}  # fmt: skip
_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": float("inf")}


@signals.held()
def compress(
    plan: Plan, q: Any, k: Any, v: Any, image_mask: Any = None, engine: str = "native", **options: Unpack[GivenOptions]
) -> Result:
    """Compresses the KV pairs of one prompt.

    q: [L, H, T, d]; k, v: [L, Hkv, T, d]; floating point, with position encoding. H is a multiple of Hkv.
    image_mask: [T] bool, True for an image token; None: all text.
    engine: "native" (libkvedge) or "numpy" (the definitions in stages/).
    options, by keyword:
    kv_type: storage type that k and v are rounded to (kvtypes.NAMES), or "K:V" for two types. With a quantised type d
    must be a multiple of 32, and scores and merges use f16. kv_rotate: whether q8_0, q4_0 and tq3 round rotated rows:
    "on", "off", or "auto": if d is a multiple of 64; the result is rotated back. threads: of the native engine; 0: all
    cores, or fewer for small arrays.
    profile: a Profile, its file, or several, for the stages of the plan that need one (Plan.profile_kinds). Shapes are
    [L, H], [L, Hkv] (key-redundancy, head-budgets), or [L, budgets] (prefix).
    stream: tokens per step; each step is compressed together with the rows kept before (docs/long.md). 0: one prompt. A
    stream needs a budget in pairs and a kv_type that is not quantised; its scores are [L, Hkv, 0].
    rotation: how q and k were rotated for positions 0 to T - 1, for scorer expected; None: not rotated.
    projection: W_O of the layers, [L, H, d, D] floating point, for plans with critical: head h adds its output [d]
    times projection[l, h] to a row of the residual stream.
    replay: a second pass over the prompt, for scorer replay with source instruction or repeat; None: uses the queries
    of the prompt instead.
    Raises ArrayError, UnknownNameError, BudgetError, ProfileError, LibraryError, OutOfMemoryError.
    """
    if engine not in ENGINES:
        raise unknown("engine", str(engine), ENGINES)
    for name in options:
        if name not in _DEFAULTS:
            raise unknown("option", name, _DEFAULTS)
    chosen = SimpleNamespace(**{**_DEFAULTS, **options})
    check_number("threads", chosen.threads)
    if not isinstance(chosen.stream, numbers.Integral) or chosen.stream < 0:
        raise ArrayError(f"stream must be a number of tokens, or 0, not {chosen.stream!r:.40}")
    kv_type = KvType.parse(chosen.kv_type, chosen.kv_rotate)
    if not isinstance(plan, Plan):
        raise ArrayError(f"plan must be a pykvedge.Plan, for example pykvedge.plan('lookm'), not {type(plan).__name__}")
    arrays = _check(q, k, v, image_mask, kv_type)
    projection = _projected(plan, chosen.projection, arrays)
    arrays = arrays._replace(rotation=_turned(chosen.rotation, arrays.k), projection=projection, replay=chosen.replay)
    if chosen.replay is not None:
        _check_replay(chosen.replay, arrays, chosen.stream)
    from pykvedge.plans.profile import for_arrays

    found = for_arrays(plan, chosen.profile, len(arrays.q), arrays.q.shape[1], arrays.k.shape[1])
    tables = {stage: profile.table for stage, profile in found.items()}
    if chosen.stream:
        _check_stream(plan, kv_type)
    if engine == "native":
        from pykvedge.library import native_plan

        return native_plan.compress_arrays(plan, arrays, kv_type, chosen.threads, tables, chosen.stream)
    if chosen.stream:
        from pykvedge.reference import stream as numpy_stream

        return numpy_stream.run(plan, arrays, kv_type, chosen.stream, tables)
    from pykvedge.reference import engine as numpy_engine

    return numpy_engine.run(plan, arrays, kv_type, tables)


def _turned(rotation: Any, k: np.ndarray) -> Rotation | None:
    from pykvedge.reference.stages.rotation import Rotation

    if rotation is not None and not isinstance(rotation, Rotation):
        raise ArrayError(f"rotation must be a pykvedge.Rotation, not {type(rotation).__name__}")
    if rotation is not None and 2 * len(rotation.angles) > k.shape[3]:
        raise ArrayError(f"a rotation of {2 * len(rotation.angles)} channels does not fit a head of {k.shape[3]}")
    return rotation


def _projected(plan: Plan, projection: Any, arrays: Arrays) -> np.ndarray | None:
    n_layers, n_heads, _, size = arrays.q.shape
    if projection is None:
        if plan.projects:
            who = (
                f"critical {plan.critical}" if plan.critical != "none" else f"scorer '{plan.scorer}' with its settings"
            )
            raise ArrayError(
                f"{who} needs the output projection of each layer: give projection, [{n_layers}, {n_heads}, {size}, D]"
            )
        return None
    out = _floats(projection, "projection")
    if out.shape[:3] != (n_layers, n_heads, size):
        raise ArrayError(f"projection must be [{n_layers}, {n_heads}, {size}, D], not {list(out.shape)}")
    return out


def _check_replay(replay: Any, arrays: Arrays, stream: int) -> None:
    from pykvedge.reference.stages.replay import Replay

    if not isinstance(replay, Replay):
        raise ArrayError(f"replay must be a pykvedge.Replay, not {type(replay).__name__}")
    if stream:
        raise ArrayError("replay does not work with stream, because a stream has no second pass; omit replay")
    replay.check(arrays.q, arrays.k)


def _check_stream(plan: Plan, kv_type: KvType) -> None:
    from pykvedge.library.native_plan import check_stream

    check_stream(plan)
    if kv_type.quantised:
        raise ArrayError(f"stream does not work with kv_type {kv_type}, which would round rows at every step; use f16")


def _check(q: Any, k: Any, v: Any, image_mask: Any, kv_type: KvType) -> Arrays:
    import numpy as np

    from pykvedge.reference.engine import Arrays

    q, k, v = (_floats(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if k.shape != v.shape:
        raise ArrayError(f"k and v must have the same shape, not {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ArrayError(f"q [L, H, T, d] and k [L, Hkv, T, d] must agree in L, T and d, not {q.shape} and {k.shape}")
    if q.shape[1] % k.shape[1]:
        raise ArrayError(f"the number of query heads, {q.shape[1]}, must be a multiple of the KV heads, {k.shape[1]}")
    if k.shape[3] % 8:
        raise ArrayError(f"the head size must be a multiple of 8, not {k.shape[3]}")
    if kv_type.quantised and k.shape[3] % GROUP:
        raise ArrayError(f"kv_type {kv_type} needs a head size that is a multiple of {GROUP}, not {k.shape[3]}")
    kv_type.blocks(k.shape[3])
    for x, name, held in ((k, "k", kv_type.plain.k), (v, "v", kv_type.plain.v)):
        if np.abs(x).max() > _LARGEST[held]:
            raise ArrayError(f"{name} has values that {held} cannot represent; use kv_type bf16 or f32")
    n_tokens = k.shape[2]
    mask = np.zeros(n_tokens, dtype=bool) if image_mask is None else np.asarray(image_mask)
    if mask.shape != (n_tokens,) or mask.dtype != bool:
        raise ArrayError(f"image_mask must be [{n_tokens}] of bool, not {list(mask.shape)} of {mask.dtype}")
    return Arrays(q, k, v, mask)


def _floats(x: Any, name: str) -> np.ndarray:
    import numpy as np

    try:
        x = np.asarray(x)
    except ValueError as error:
        raise ArrayError(f"{name} is not an array: {error}") from None
    if x.ndim != 4 or 0 in x.shape:
        raise ArrayError(f"{name} must have four dimensions, [layers, heads, tokens, head size], not {list(x.shape)}")
    if x.dtype.kind != "f":
        raise ArrayError(f"{name} must hold floating-point numbers, not {x.dtype}")
    x = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(x).all():
        raise ArrayError(f"{name} holds NaN or infinite values")
    return x
