"""kvedge runs vision-language models on llama.cpp with a KV cache that is compressed after the prompt.

    import pykvedge

    with pykvedge.Session("model.gguf", "mmproj.gguf", pykvedge.plan("kvedge", budget=0.2)) as session:
        for piece in session.ask("What is in the picture?", images="photo.jpg"):
            print(piece, end="", flush=True)

A Session is a conversation; without files it has the packaged model, which knows drawn scenes. load() reads a model
once for several sessions. plan() decides what to keep of a prompt. attach() compresses the prompts of a
llama_cpp.Llama. compress() compresses arrays. hub.resolve() finds models by name. All errors derive from KvedgeError.
docs/python.md has an example of each.

kvedge contains the llama_cpp bindings on top of its libraries. If another llama-cpp-python is installed too, import
pykvedge before llama_cpp.
"""

from __future__ import annotations

import importlib

from pykvedge.native import carried

TYPE_CHECKING = False  # avoids the time of importing typing
if TYPE_CHECKING:
    from typing import Any

    from pykvedge.chat.attachment import Attachment, attach
    from pykvedge.chat.conversation import Answer
    from pykvedge.chat.session import Session
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
        KvedgeWarning,
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
    from pykvedge.library.arrays import Result, compress
    from pykvedge.models import hub
    from pykvedge.models.documents import pages
    from pykvedge.models.images import Picture, load_picture
    from pykvedge.models.prompt import Message
    from pykvedge.models.video import frames
    from pykvedge.native.abi import ReplayChunk
    from pykvedge.plans.amounts import Budget
    from pykvedge.plans.making import default_plan, plan
    from pykvedge.plans.plan import Plan
    from pykvedge.plans.plugins.decorators import allocator, preset, pruner, reducer, scorer
    from pykvedge.plans.presets import methods
    from pykvedge.plans.profile import Profile
    from pykvedge.reference.stages.base import Head, ImageRows, Layer, Param, Prompt
    from pykvedge.reference.stages.replay import Replay
    from pykvedge.reference.stages.rotation import Rotation
    from pykvedge.runtime.loaded import LoadedModel, load
    from pykvedge.runtime.logprobs import Alternative, Token
    from pykvedge.runtime.report import Report
    from pykvedge.runtime.sampling import Sampling
    from pykvedge.runtime.settings import Keep, Settings

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
    "Head",
    "HubError",
    "ImageError",
    "ImageRows",
    "Keep",
    "KvedgeError",
    "KvedgeWarning",
    "Layer",
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
    "Prompt",
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
    "pages",
    "plan",
    "preset",
    "pruner",
    "reducer",
    "scorer",
]

# Imports each name at its first use, so that the program handles Ctrl-C before the imports are complete.
_MODULES = {
    "chat.conversation": ("Answer",),
    "chat.attachment": ("Attachment", "attach"),
    "chat.session": ("Session",),
    "models.images": ("Picture", "load_picture"),
    "models.prompt": ("Message",),
    "models.documents": ("pages",),
    "models.video": ("frames",),
    "native.abi": ("ReplayChunk",),
    "plans.amounts": ("Budget",),
    "plans.making": ("default_plan", "plan"),
    "plans.plan": ("Plan",),
    "plans.plugins.decorators": ("allocator", "preset", "pruner", "reducer", "scorer"),
    "plans.presets": ("methods",),
    "plans.profile": ("Profile",),
    "reference.stages.base": ("Head", "ImageRows", "Layer", "Param", "Prompt"),
    "reference.stages.replay": ("Replay",),
    "reference.stages.rotation": ("Rotation",),
    "library.arrays": ("Result", "compress"),
    "runtime.loaded": ("LoadedModel", "load"),
    "runtime.logprobs": ("Alternative", "Token"),
    "runtime.report": ("Report",),
    "runtime.sampling": ("Sampling",),
    "runtime.settings": ("Keep", "Settings"),
}
_LATER = {name: module for module, names in _MODULES.items() for name in names}
_LATER |= {name: "errors" for name in __all__ if name.endswith(("Error", "Warning"))}


if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name == "hub":
            return importlib.import_module("pykvedge.models.hub")
        if name == "libraries":  # the llama_cpp bindings use this name
            return importlib.import_module("pykvedge.native.libraries")
        if name in _LATER:
            return getattr(importlib.import_module(f"pykvedge.{_LATER[name]}"), name)
        if name == "__version__":
            return importlib.import_module("pykvedge.system.version").package_version()
        raise AttributeError(f"module 'pykvedge' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


carried.prepare()
