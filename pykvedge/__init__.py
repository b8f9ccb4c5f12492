"""kvedge: vision-language models on llama.cpp with a KV cache that is compressed after the prompt.

    import pykvedge
    session = pykvedge.Session("model.gguf", "mmproj.gguf", pykvedge.plan("lookm", budget=0.2))
    for piece in session.ask("What is in the picture?", images=["photo.jpg"]):
        print(piece, end="", flush=True)

kvedge brings the llama_cpp bindings along, on top of its own libraries. Where another llama-cpp-python is installed as
well, import pykvedge before llama_cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# plan, compress and attach are functions that bear the name of their module: bound here, once, they hide the modules.
from pykvedge.attach import attach
from pykvedge.compress import Result, compress
from pykvedge.errors import (
    ArrayError,
    BudgetError,
    ContextError,
    ImageError,
    KvedgeError,
    LibraryError,
    ModelError,
    NothingToCompressError,
    OutOfMemoryError,
    PluginError,
    ProfileError,
    SessionFileError,
    StateError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
)
from pykvedge.libraries import prepare
from pykvedge.plan import Budget, Plan
from pykvedge.plugins.decorators import allocator, preset, reducer, scorer
from pykvedge.presets import default_plan, methods, plan

if TYPE_CHECKING:
    from pykvedge.profile import Profile
    from pykvedge.session import Session
    from pykvedge.stages.base import Param

    __version__: str

__all__ = [
    "ArrayError",
    "Budget",
    "BudgetError",
    "ContextError",
    "ImageError",
    "KvedgeError",
    "LibraryError",
    "ModelError",
    "NothingToCompressError",
    "OutOfMemoryError",
    "Param",
    "Plan",
    "PluginError",
    "Profile",
    "ProfileError",
    "Result",
    "Session",
    "SessionFileError",
    "StateError",
    "UnknownNameError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "allocator",
    "attach",
    "compress",
    "default_plan",
    "methods",
    "plan",
    "preset",
    "reducer",
    "scorer",
]


def __getattr__(name: str) -> Any:
    if name == "Session":
        from pykvedge.session import Session

        return Session
    if name == "Param":
        from pykvedge.stages.base import Param

        return Param
    if name == "Profile":
        from pykvedge.profile import Profile

        return Profile
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'pykvedge' has no attribute '{name}'")


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("kvedge")
    except metadata.PackageNotFoundError:
        return "0+source"  # run from a source tree that was never installed


prepare()
