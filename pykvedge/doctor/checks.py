"""The checks of `kvedge doctor`, run by a child process. The child reports each step, so a crash or a hang is a
finding. Libraries report facts; kernels are compared with loops, products with NumPy, an answer with a known answer.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np

import pykvedge
from pykvedge.errors import KvedgeError, UnsoundError
from pykvedge.library import libkvedge
from pykvedge.native import backends, ggml, llamacpp
from pykvedge.native import libraries as native_libraries
from pykvedge.native.ggml import call
from pykvedge.plans.plan import Plan

if TYPE_CHECKING:
    from pykvedge.runtime.report import Report

ROWS = (1, 7, 33)  # one token, a few tokens, more tokens than any kernel takes at once
N, K = 64, 512  # rows of a weight and their length: the least that every kind of memory takes
EXPERTS = 3
# Weights that measure the speed of memory. The second size exceeds all caches, and is for fast devices.
ROW, MEASURED_BYTES, MEASURED_S = 4096, (8 << 20, 256 << 20), 1.0
# Largest error of a product, as a share of |row| |weight| / sqrt(K), the size of a product of unrelated rows. ggml
# rounds rows to the type's partner: f16, bf16, or 8 bits in blocks of 32 or 256; six deviations are 0.05.
TOLERANCES = {"F32": 1e-4, "F16": 5e-3, "BF16": 3e-2}
TOLERANCE = 6e-2
# ggml takes seconds to write these types. Every bit pattern is valid, so they get random bits and a scale.
_ANY_BITS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
_NOT_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")
PICTURE = "doctor.png"  # a scene that is not in the model's training data
QUESTION = "Describe the image."
EXPECTED = (
    "a red triangle at the top left, a red circle at the middle centre, a pink circle at the bottom left, "
    "a yellow circle at the bottom centre, and the code 64UM3 at the top centre."
)

At = Callable[[str], None]


class Step(NamedTuple):
    """One check: run(at) calls at(detail) during the work, returns facts or None, and raises if the result is wrong.

    part: steps that would crash together share a part; after some crashes, other steps of the part are not tried.
    """

    name: str
    run: Callable[[At], dict[str, Any] | None]
    part: str = ""


def main(module: str, groups: list[str], done: list[str], left: list[str]) -> None:
    """Runs the steps of groups, which are functions of a module. Writes a line of JSON at every change of a step.

    done: known steps of the first group. left: parts that are not tried.
    """
    # libraries that write to stdout must not disturb the lines
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    between = Step("", lambda at: None)

    def say(step: Step, **more: Any) -> None:
        out.write(json.dumps({"group": group, "name": step.name, "part": step.part, **more}) + "\n")

    for group in groups:
        say(between)
        try:
            for step in getattr(importlib.import_module(module), group)():
                if step.name not in done:
                    _try(step, step.part not in left, functools.partial(say, step))
        except Exception as error:
            say(between, fault=_text(error), over=True)
        done = []
    out.write("{}\n")


def _try(step: Step, tried: bool, say: Callable[..., None]) -> None:
    at, facts, fault = "", None, ""

    def go_on(detail: str) -> None:
        nonlocal at
        at = detail
        say(at=at)

    say()
    if tried:
        try:
            facts = step.run(go_on)
        except Exception as error:
            fault = _text(error)
    say(at=at if fault else "", facts=facts or {}, fault=fault, tried=tried, over=True)


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, KvedgeError) else f"{type(error).__name__}: {text}"


def libraries() -> Iterator[Step]:
    """Yields the steps that load the libraries, in the order of their dependencies."""
    yield Step("llama.cpp and its bindings", _llama)
    yield Step("the image library", lambda at: native_libraries.mtmd() and None)
    yield Step("libkvedge", lambda at: {"libkvedge": libkvedge.version(), "kernels": libkvedge.kernel_tables()})
    yield Step("ggml's devices", _devices)


def _llama(at: At) -> dict[str, Any]:
    bindings = llamacpp.start(verbose=False, vision=False)
    return {
        "kvedge": pykvedge.__version__,
        "package": str(Path(pykvedge.__file__).parent),
        "libraries": str(native_libraries.require_dir()),
        "llama.cpp": bindings.llama_version().decode(),
        "bindings": sys.modules["llama_cpp"].__version__,
        "bindings_place": str(Path(bindings.__file__).parent),
    }


def _devices(at: At) -> dict[str, Any]:
    cpu = ggml.cpu()
    found = [{k: v for k, v in asdict(d).items() if k != "handle"} for d in ggml.devices()]
    memories = [name for name, _ in ggml.buffer_types(cpu)]
    return {"devices": found, "cpu_features": ggml.features(cpu), "weight_memory": memories}


def packages() -> Iterator[Step]:
    """Yields a step for each installed package with a ggml backend."""
    native_libraries.load_backends()
    for package in backends.packages():
        yield Step(package.name, functools.partial(_package, package))


def _package(package: backends.Package, at: At) -> dict[str, Any]:
    if package.broken:
        raise UnsoundError(package.problem)
    return {"backend": package.backend, "module": package.module, "problem": package.problem}


def devices() -> Iterator[Step]:
    """Yields a step for the processor and each GPU: the speed of memory, of a prompt and of an answer."""
    for device in ggml.devices():
        if device.kind == "CPU" or "GPU" in device.kind:
            yield Step(device.name, functools.partial(_measured, device), device.name)


def _measured(device: ggml.Device, at: At) -> dict[str, Any]:
    settings: dict[str, Any] = {"device": "none"} if device.kind == "CPU" else {"device": device.name, "gpu_layers": -1}
    # twice: drivers compile their code at the first use
    _answer(pykvedge.default_plan(), at, settings)
    report = _answer(pykvedge.default_plan(), at, settings)
    at("reading memory")  # by products of the model's type, whose code is compiled now
    memory, speed = call("backend_dev_buffer_type", device.handle), 0.0
    for size in MEASURED_BYTES:
        if size == MEASURED_BYTES[0] or (speed * MEASURED_S > size and device.free_bytes > 4 * size):
            weight = ggml.Weight(ggml.Q8_0, memory, (1, size // ROW, ROW), llamacpp.default_threads(), device.handle)
            speed = weight.bytes_per_second(MEASURED_S)
    t = report.time
    return {
        "bytes_per_second": round(speed),
        "prompt_tokens_per_second": round(report.tokens.prompt / max(t.encode_s + t.prefill_s + t.compress_s, 1e-9), 1),
        "answer_tokens_per_second": round(t.decode_tok_s, 1),
    }


def kernels() -> Iterator[Step]:
    """Yields a step for each table of libkvedge's kernels that this processor can run."""
    for table in libkvedge.kernel_tables():
        yield Step(table, lambda at, table=table: libkvedge.check_kernels(table), table)


def model() -> Iterator[Step]:
    """Yields a step with the whole cache and a step with a compressed cache, for a question with a known answer."""
    for plan in (pykvedge.plan("full"), pykvedge.default_plan()):
        name = "the whole cache" if plan.method == "full" else f"{plan.method} at {plan.budget}"
        yield Step(name, functools.partial(_ask, plan))


def _ask(plan: Plan, at: At) -> dict[str, Any]:
    _answer(plan, at, {"device": "none"})
    return {"question": QUESTION, "answer": EXPECTED}


def _answer(plan: Plan, at: At, settings: dict[str, Any]) -> Report:
    """Returns the report of an answer. Raises UnsoundError if the answer differs from the processor's."""
    from pykvedge.runtime.sampling import Sampling

    folder = Path(pykvedge.__file__).parent / "data"
    files = (folder / "demo-model.gguf", folder / "demo-mmproj.gguf")
    if not all(file.is_file() for file in files):
        raise UnsoundError(f"the folder {folder} has no demo model; reinstall kvedge")
    at("loading")
    with pykvedge.Session(*files, plan, **settings) as session:
        at("answering")
        given = session.ask(QUESTION, [folder / PICTURE], Sampling(max_tokens=120))
        answer = given.read().strip()
    if answer != EXPECTED:
        raise UnsoundError(f"the answer is '{answer}' instead of '{EXPECTED}'")
    return given.report


def products() -> Iterator[Step]:
    """Yields a step for each type of weight in each kind of memory that llama.cpp may use."""
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
                raise UnsoundError(f"wrong: {what} differs by {error:.2g}, more than the allowed {most:g}")
            worst = max(worst, error)
    return {"error": round(worst, 6)}


def _weight(kind: Any, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns n rows of K values as bytes of a type, and the values as an independent reader decodes them."""
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
    if kind.name == "IQ1_M":  # the scale is in the upper four bits of the last four words
        words = blocks[:, -8:].view("<u2")
        words &= 0x0FFF
        words |= np.array([scale.view(np.uint16) >> 4 * i << 12 & 0xF000 for i in range(4)], "<u2")
    else:
        blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(n, -1)


def _error(got: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> float:
    """Returns the largest error in units of |row| |weight| / sqrt(k). got [m][n], rows [m][k], weights [n][k]."""
    rows, weights = rows.astype(np.float64), weights.astype(np.float64)
    sizes = np.outer(np.linalg.norm(rows, axis=1), np.linalg.norm(weights, axis=1)) / np.sqrt(rows.shape[1])
    errors = np.abs(got - rows @ weights.T) / np.maximum(sizes, 1e-6)
    # NaN is worse than any number
    return float(np.max(np.nan_to_num(errors, nan=np.inf, posinf=np.inf), initial=0.0))
