"""libkvedge with its prototypes, and calls of it whose failures are exceptions. Nothing is loaded on import."""

from __future__ import annotations

import ctypes as c
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from pykvedge import errors
from pykvedge.native import libraries
from pykvedge.native.abi import PROTOTYPES, STAGE_NUMBER, Error, Facts, Setting, text

P = ParamSpec("P")
R = TypeVar("R")

_ERROR_OF_STATUS: dict[int, type[errors.KvedgeError]] = {
    1: errors.UsageError, 2: errors.UnknownNameError, 3: errors.BudgetError, 4: errors.OutOfMemoryError,
    5: errors.NothingToCompressError, 6: errors.StateError, 7: errors.UnsupportedError, 8: errors.PluginError,
    9: errors.SessionFileError,
}  # fmt: skip


@functools.cache
def lib() -> c.CDLL:
    """libkvedge with its prototypes. Raises LibraryError when it is missing or of another version."""
    handle = libraries.kvedge()
    for name, (result, arguments) in PROTOTYPES.items():
        try:
            function = getattr(handle, f"kvedge_{name}")
        except AttributeError:
            raise errors.LibraryError(f"libkvedge lacks kvedge_{name}; {libraries.HOW_TO_BUILD}") from None
        function.restype, function.argtypes = result, arguments
    return handle


def describe() -> str:
    """Tells in a line per library its version and what it uses of the machine, or that it is missing."""
    try:
        handle, llama = lib(), libraries.load("llama")
    except errors.LibraryError as error:
        return f"libraries: {error}"
    llama.llama_version.restype = c.c_char_p
    found = f"llama.cpp {text(llama.llama_version())} in {libraries.require_dir()}"
    return f"{found}\nlibkvedge {text(handle.kvedge_version())} ({text(handle.kvedge_simd())})"


def stage_settings(stage: str, member: str) -> list[Setting]:
    """Settings of a member of the library's, by its name."""
    found = (lib().kvedge_stage_setting(STAGE_NUMBER[stage], member.encode(), i) for i in itertools.count())
    return [setting.contents for setting in itertools.takewhile(bool, found)]


def stage_facts(stage: str, member: str, settings: Sequence[float], kept: int = 0, even: int = 0) -> Facts:
    """What follows from the settings of a member of the library's, for a head of `kept` pairs and an `even` share."""
    out = Facts(struct_size=c.sizeof(Facts), kept=kept, even=even)
    given = (c.c_double * len(settings))(*settings)
    call("stage_get_facts", STAGE_NUMBER[stage], member.encode(), given, len(settings), c.byref(out))
    return out


@functools.cache
def kv_types() -> dict[str, float]:
    """The library's storage types in the order of their numbers: name -> bytes of a number with its share of scales."""
    names = itertools.takewhile(bool, map(lib().kvedge_type_name, itertools.count()))
    return {text(name): lib().kvedge_type_bytes(i) / 32 for i, name in enumerate(names)}


def raise_(error: Error) -> None:
    """Raises what the status of a kvedge_error stands for (errors.py)."""
    message = error.text or f"libkvedge failed with status {error.status}"
    raise _ERROR_OF_STATUS.get(error.status, errors.KvedgeError)(message)


def call(name: str, *arguments: Any) -> None:
    """kvedge_NAME(arguments, &error). Raises where it fails."""
    error = Error()
    if getattr(lib(), f"kvedge_{name}")(*arguments, c.byref(error)) != 0:
        raise_(error)


class Raised:
    """What a function of Python's raised that C called. It cannot pass through C: it is kept, and raised behind it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def keeping(self, function: Callable[P, R], otherwise: R) -> Callable[P, R]:
        """Makes a function that C can call. otherwise: what it returns for one that raised, "stop" in C's words."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                self._error = self._error or error
                return otherwise

        return call

    def again(self) -> None:
        """Raises the first that was kept, if any was."""
        error, self._error = self._error, None
        if error is not None:
            raise error
