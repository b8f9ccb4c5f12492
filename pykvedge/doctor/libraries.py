"""Every library is loaded and says what it is and what devices it found; each table of kernels meets plain loops."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pykvedge
from pykvedge.doctor.steps import At, Step
from pykvedge.library import libkvedge
from pykvedge.native import libraries, llamacpp


def steps() -> Iterator[Step]:
    """Makes the steps in the order in which they need each other."""
    yield Step("llama.cpp and its bindings", _llama)
    yield Step("the image library", _mtmd)
    yield Step("libkvedge", _kvedge)
    yield Step("ggml's devices", _devices)


def kernels() -> Iterator[Step]:
    """Makes a step for each table of libkvedge's kernels that this processor can run."""
    for table in libkvedge.kernel_tables():
        yield Step(table, functools.partial(_kernels, table), part=table)


def _kernels(table: str, at: At) -> None:
    libkvedge.check_kernels(table)


def _llama(at: At) -> dict[str, Any]:
    at("loading")
    bindings = llamacpp.start(verbose=False, vision=False)
    place = Path(bindings.__file__).parent
    return {
        "kvedge": pykvedge.__version__,
        "package": str(Path(pykvedge.__file__).parent),
        "libraries": str(libraries.require_dir()),
        "llama.cpp": bindings.llama_version().decode(),
        "bindings": sys.modules["llama_cpp"].__version__,
        "bindings_place": str(place),
    }


def _mtmd(at: At) -> None:
    at("loading")
    libraries.mtmd()


def _kvedge(at: At) -> dict[str, Any]:
    at("loading")
    return {"libkvedge": libkvedge.version(), "kernels": libkvedge.kernel_tables()}


def _devices(at: At) -> dict[str, Any]:
    from pykvedge.native import ggml

    at("asking")
    cpu = ggml.cpu()
    found = [{k: v for k, v in asdict(d).items() if k != "handle"} for d in ggml.devices()]
    memories = [name for name, _ in ggml.buffer_types(cpu)]
    return {"devices": found, "cpu_features": ggml.features(cpu), "weight_memory": memories}
