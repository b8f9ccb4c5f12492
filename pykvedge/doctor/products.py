"""Products of each weight type, in each kind of memory that llama.cpp may use, are compared with plain NumPy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

from pykvedge.doctor.steps import At, Step
from pykvedge.errors import UnsoundError
from pykvedge.native import ggml, llamacpp

ROWS = (1, 7, 33)  # a token, a few, more than any kernel takes at once
N, K = 64, 512  # rows of a weight and their length: the least that every kind of memory takes
EXPERTS = 3
# Largest error of a product, as a share of |row| |weight| / sqrt(K), which is the size of a product of unrelated rows.
# ggml rounds rows to the type's partner: f16, bf16, or 8 bits in blocks of 32 or 256, of which six deviations are 0.05.
TOLERANCES = {"F32": 1e-4, "F16": 5e-3, "BF16": 3e-2}
TOLERANCE = 6e-2
# ggml takes seconds to write these; every pattern of their bits is a weight, so they get random ones, and a scale
_ANY_BITS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
_NOT_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")


def steps() -> Iterator[Step]:
    """Makes a step for each type and kind of memory."""
    kinds = [k for k in gguf.GGMLQuantizationType if k.name not in _NOT_WEIGHTS]
    for memory, handle in ggml.buffer_types(ggml.cpu()):
        for kind in kinds:
            used = [e for e in (1, EXPERTS) if ggml.Weight(kind, handle, (e, N, K), 1).supported(ROWS[-1])]
            if used:
                run = functools.partial(_check, kind, handle, used)
                yield Step(f"{kind.name} in {memory} memory", run, part=memory)


def _check(kind: Any, memory: int, stacks: list[int], at: At) -> dict[str, Any]:
    threads = min(llamacpp.default_threads(), 2)
    rng = np.random.default_rng(int(kind))
    worst = 0.0
    for e in stacks:
        at("writing the weight")
        data, values = _weight(kind, e * N, rng)
        weight, matrices = ggml.Weight(kind, memory, (e, N, K), threads), values.reshape(e, N, K)
        for m in ROWS:
            what = f"{m} row{'s' * (m > 1)}" + f" of {e} experts" * (e > 1)
            at(what)
            rows = rng.standard_normal((m, K), np.float32)
            experts = rng.integers(0, e, m)
            got = weight.times(data, rows, experts)
            error = max(_error(got[experts == i], rows[experts == i], matrix) for i, matrix in enumerate(matrices))
            most = TOLERANCES.get(kind.name, TOLERANCE)
            if not error <= most:
                raise UnsoundError(f"wrong: {what} off by {error:.2g} where {most:g} is allowed")
            worst = max(worst, error)
    return {"error": round(worst, 6)}


def _weight(kind: Any, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Makes n rows of K values as bytes of a type, and what a reader that shares no code with the products finds."""
    if kind.name in _ANY_BITS:
        data = _any_bits(kind, n, rng)
    else:
        data = ggml.quantised(int(kind), rng.standard_normal((n, K), np.float32))
    try:
        return data, gguf.quants.dequantize(data, kind).reshape(n, K)
    except NotImplementedError:
        return data, ggml.widened(int(kind), data, K)


def _any_bits(kind: Any, n: int, rng: np.random.Generator) -> np.ndarray:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n * K // values, size), np.uint8)
    scale = np.float16(0.05)
    if kind.name == "IQ1_M":  # its scale is in the upper four bits of the last four words
        words = blocks[:, -8:].view("<u2")
        words &= 0x0FFF
        words |= np.array([scale.view(np.uint16) >> 4 * i << 12 & 0xF000 for i in range(4)], "<u2")
    else:
        blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(n, -1)


def _error(got: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> float:
    """Finds the largest error in units of |row| |weight| / sqrt(k). got [m][n], rows [m][k], weights [n][k]."""
    rows, weights = rows.astype(np.float64), weights.astype(np.float64)
    sizes = np.outer(np.linalg.norm(rows, axis=1), np.linalg.norm(weights, axis=1)) / np.sqrt(rows.shape[1])
    errors = np.abs(got - rows @ weights.T) / np.maximum(sizes, 1e-6)
    # no number is worse than any
    return float(np.max(np.nan_to_num(errors, nan=np.inf, posinf=np.inf), initial=0.0))
