"""Loads ggml backends from other packages, such as kvedge-vulkan. A package has one module, found by an entry point.

The entry point is in group kvedge.backends, has ggml's name of the backend, and refers to a Python package. MODULE of
that package is the module's file name, PIN the llama.cpp that the module was built from. A module with another pin is
never loaded: the layouts of its structures may differ.
"""

from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pykvedge.errors import LibraryError
from pykvedge.native import libcheck

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kvedge.backends"
PIN_FILE = "llama-pin.txt"  # the build writes this file beside the libraries (cmake/LlamaSource.cmake)
_DRIVERS = {
    "CUDA": "no NVIDIA GPU is available to CUDA; check NVIDIA's driver",
    "Vulkan": "no GPU with a Vulkan driver is available; on Debian and Ubuntu install mesa-vulkan-drivers",
}
_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_found: list[Package] = []


@dataclass(frozen=True)
class Package:
    """An installed package with a backend. problem: why it is not used, or empty. broken: a driver would not help."""

    name: str
    backend: str
    module: str = ""
    problem: str = ""
    broken: bool = False


def packages() -> tuple[Package, ...]:
    """Returns the state of each installed package, after libraries.load_backends."""
    return tuple(_found)


def unused() -> str:
    """Returns the reason for each unused package, or an empty string."""
    return "".join(f"; {p.name} is not used: {p.problem}" for p in packages() if p.problem)


def load(place: Path, library: Callable[[str], c.CDLL]) -> None:
    """Loads the modules of installed packages, at most one per backend.

    place: folder of kvedge's libraries. library: loads one of these libraries by name.
    """
    from importlib import metadata

    found: list[Package] = []
    # the highest name first: kvedge-cuda13 before kvedge-cuda12
    points = sorted(metadata.entry_points(group=GROUP), key=lambda p: p.value, reverse=True)
    # ggml uses the first backend of a GPU: CUDA before Vulkan
    for point in sorted(points, key=lambda p: p.name):
        used = next((p.name for p in found if p.backend == point.name and not p.problem), "")
        found.append(_look(point, used, place, library))
    _found[:] = found


def _look(point: EntryPoint, used: str, place: Path, library: Callable[[str], c.CDLL]) -> Package:
    name = point.dist.name if point.dist else point.value
    again = f"pip install --force-reinstall {name}"
    try:
        package = point.load()
        module, pin = Path(package.__file__).parent / package.MODULE, str(package.PIN)
    except Exception as error:  # foreign code may raise anything
        return Package(name, point.name, problem=f"the package cannot be imported ({error}); {again}", broken=True)
    tell = functools.partial(Package, name, point.name, str(module))
    if pin != (ours := _pin(place)):
        why = (
            f"the package is built for llama.cpp {pin}, but this kvedge needs {ours}; install {name} and kvedge of "
            f"one version"
        )
        return tell(why, True)
    if used:
        return tell(f"{used} has the same devices and is used; uninstall one of the two packages with pip")
    try:
        libcheck.check_machine(module, again)
        c.CDLL(str(module))  # raises the loader's message, which ggml would only log
    except LibraryError as error:
        return tell(str(error), True)
    except OSError as error:
        return tell(str(libcheck.explain(module, str(error), again)), not libcheck.lacks_driver(str(error)))
    return tell(_registered(module, point.name, library))


def _pin(place: Path) -> str:
    try:
        return (place / PIN_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return "of an unknown version"


def _registered(module: Path, backend: str, library: Callable[[str], c.CDLL]) -> str:
    """Loads a module into ggml. Returns why it cannot be used, or an empty string."""
    ggml = library("ggml")
    for name in ("ggml_backend_load", "ggml_backend_reg_by_name"):
        getattr(ggml, name).restype, getattr(ggml, name).argtypes = c.c_void_p, [c.c_char_p]
    count = ggml.ggml_backend_reg_dev_count
    count.restype, count.argtypes = c.c_size_t, [c.c_void_p]
    there = ggml.ggml_backend_reg_by_name(backend.encode())
    if there and count(there):
        return f"this build of kvedge has {backend} of its own"
    with _heard(library("ggml-base")) as lines:
        registry = ggml.ggml_backend_load(str(module).encode())
    if registry and count(registry):
        return ""
    said = " ".join("".join(lines).split()).partition("load_backend: ")[0].strip()
    return _DRIVERS.get(backend, "the package finds no device") + (f" ({said})" if said else "")


@contextmanager
def _heard(base: c.CDLL) -> Iterator[list[str]]:
    """Collects ggml's log inside the block."""
    lines: list[str] = []
    base.ggml_log_get.argtypes, base.ggml_log_set.argtypes = [c.c_void_p] * 2, [c.c_void_p] * 2
    log, data = c.c_void_p(), c.c_void_p()

    def hear(level: int, text: bytes, _: Any) -> None:
        lines.append(text.decode("utf-8", "replace"))

    callback = _LOG(hear)
    base.ggml_log_get(c.byref(log), c.byref(data))
    base.ggml_log_set(c.cast(callback, c.c_void_p), None)
    try:
        yield lines
    finally:
        base.ggml_log_set(log, data)
