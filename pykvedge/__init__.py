"""kvedge runs vision-language models on llama.cpp with a KV cache that is compressed after the prompt.

    import pykvedge

    with pykvedge.Session("model.gguf", "mmproj.gguf", pykvedge.plan("lookm", budget=0.2)) as session:
        for piece in session.ask("What is in the picture?", images="photo.jpg"):
            print(piece, end="", flush=True)

A Session is a conversation. load() reads a model once for several of them, plan() says what is kept of a prompt,
attach() does the same for a llama_cpp.Llama, compress() for arrays, hub.resolve() finds models by name. Everything that
is raised derives from KvedgeError. docs/python.md has an example of each.

kvedge brings the llama_cpp bindings along, on top of its own libraries. Where another llama-cpp-python is installed as
well, import pykvedge before llama_cpp.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pykvedge.chat.attachment import Attachment, attach
from pykvedge.errors import (
    ArrayError,
    BrokenRuleError,
    BudgetError,
    CancelledError,
    ContextError,
    DatasetError,
    DeviceError,
    GrammarError,
    HubError,
    ImageError,
    KvedgeError,
    LibraryError,
    ModelError,
    NothingToCompressError,
    OutOfMemoryError,
    PluginError,
    ProfileError,
    RequestError,
    SaveError,
    SessionFileError,
    StateError,
    UnknownNameError,
    UnreachableError,
    UnsoundError,
    UnsupportedError,
    UsageError,
)
from pykvedge.native import libraries  # the bindings that kvedge carries ask for it here
from pykvedge.native.version import package_version
from pykvedge.plans.amounts import Budget
from pykvedge.plans.making import default_plan, plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugins.decorators import allocator, preset, pruner, reducer, scorer
from pykvedge.plans.presets import methods
from pykvedge.runtime.arrays import Result, compress

if TYPE_CHECKING:
    from pykvedge.chat.answer import Answer
    from pykvedge.chat.session import Session
    from pykvedge.models import hub
    from pykvedge.models.images import Picture, load_picture
    from pykvedge.models.prompt import Message
    from pykvedge.models.video import frames
    from pykvedge.plans.profile import Profile
    from pykvedge.plans.stages.base import Param
    from pykvedge.plans.stages.replay import Replay, ReplayChunk
    from pykvedge.plans.stages.rotation import Rotation
    from pykvedge.runtime.loaded import LoadedModel, load
    from pykvedge.runtime.logprobs import Alternative, Token
    from pykvedge.runtime.report import Report
    from pykvedge.runtime.sampling import Sampling
    from pykvedge.runtime.settings import Settings

    __version__: str

__all__ = [
    "Alternative",
    "Answer",
    "ArrayError",
    "Attachment",
    "BrokenRuleError",
    "Budget",
    "BudgetError",
    "CancelledError",
    "ContextError",
    "DatasetError",
    "DeviceError",
    "GrammarError",
    "HubError",
    "ImageError",
    "KvedgeError",
    "LibraryError",
    "LoadedModel",
    "Message",
    "ModelError",
    "NothingToCompressError",
    "OutOfMemoryError",
    "Param",
    "Picture",
    "Plan",
    "PluginError",
    "Profile",
    "ProfileError",
    "Replay",
    "ReplayChunk",
    "Report",
    "RequestError",
    "Result",
    "Rotation",
    "Sampling",
    "SaveError",
    "Session",
    "SessionFileError",
    "Settings",
    "StateError",
    "Token",
    "UnknownNameError",
    "UnreachableError",
    "UnsoundError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "allocator",
    "attach",
    "compress",
    "default_plan",
    "frames",
    "hub",
    "load",
    "load_picture",
    "methods",
    "plan",
    "preset",
    "pruner",
    "reducer",
    "scorer",
]

# These names are imported from their modules when they are asked for: sessions take longer to import than plans do.
_LATER = {
    "Alternative": "runtime.logprobs",
    "Answer": "chat.answer",
    "LoadedModel": "runtime.loaded",
    "Message": "models.prompt",
    "Param": "plans.stages.base",
    "Picture": "models.images",
    "Profile": "plans.profile",
    "Report": "runtime.report",
    "Replay": "plans.stages.replay",
    "ReplayChunk": "plans.stages.replay",
    "Rotation": "plans.stages.rotation",
    "Sampling": "runtime.sampling",
    "Session": "chat.session",
    "Settings": "runtime.settings",
    "Token": "runtime.logprobs",
    "frames": "models.video",
    "load": "runtime.loaded",
    "load_picture": "models.images",
}


if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        if name == "hub":
            return importlib.import_module("pykvedge.models.hub")
        if name in _LATER:
            return getattr(importlib.import_module(f"pykvedge.{_LATER[name]}"), name)
        if name == "__version__":
            return package_version()
        raise AttributeError(f"module 'pykvedge' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


libraries.prepare()
