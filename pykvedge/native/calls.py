"""Loads libkvedge with its prototypes, and raises exceptions for failed calls. Importing loads no library."""

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
    """Returns libkvedge with its prototypes. Raises LibraryError if it is missing or has another version."""
    handle = libraries.kvedge()
    for name, (result, arguments) in PROTOTYPES.items():
        try:
            function = getattr(handle, f"kvedge_{name}")
        except AttributeError:
            raise errors.LibraryError(f"libkvedge has no function kvedge_{name}; {libraries.HOW_TO_BUILD}") from None
        function.restype, function.argtypes = result, arguments
    return handle


def describe() -> str:
    """Returns a line per library with its version and instruction set, or why the libraries cannot be used."""
    try:
        handle, llama = lib(), libraries.load("llama")
    except errors.LibraryError as error:
        return f"libraries: {error}"
    llama.llama_version.restype = c.c_char_p
    found = f"llama.cpp {text(llama.llama_version())} in {libraries.require_dir()}"
    return f"{found}\nlibkvedge {text(handle.kvedge_version())} ({text(handle.kvedge_simd())})"


def stage_settings(stage: str, member: str) -> list[Setting]:
    """Returns the settings of a built-in stage member."""
    found = (lib().kvedge_stage_setting(STAGE_NUMBER[stage], member.encode(), i) for i in itertools.count())
    return [setting.contents for setting in itertools.takewhile(bool, found)]


def stage_facts(stage: str, member: str, settings: Sequence[float], kept: int = 0, even: int = 0) -> Facts:
    """Returns facts about a built-in stage member with settings, for `kept` pairs per head and an `even` share."""
    out = Facts(struct_size=c.sizeof(Facts), kept=kept, even=even)
    given = (c.c_double * len(settings))(*settings)
    call("stage_get_facts", STAGE_NUMBER[stage], member.encode(), given, len(settings), c.byref(out))
    return out


@functools.cache
def kv_types() -> dict[str, float]:
    """Returns the storage types in the order of their numbers: name -> bytes per value, scales included."""
    names = itertools.takewhile(bool, map(lib().kvedge_type_name, itertools.count()))
    return {text(name): lib().kvedge_type_bytes(i) / 32 for i, name in enumerate(names)}


def raise_(error: Error) -> None:
    """Raises the error class of a kvedge_error's status (errors.py)."""
    message = error.text or f"libkvedge failed with status {error.status}"
    raise _ERROR_OF_STATUS.get(error.status, errors.KvedgeError)(message)


def call(name: str, *arguments: Any) -> None:
    """Calls kvedge_NAME(arguments, &error). Raises the error if the call fails."""
    error = Error()
    if getattr(lib(), f"kvedge_{name}")(*arguments, c.byref(error)) != 0:
        raise_(error)


class CallbackErrors:
    """Keeps an exception of a Python callback, which cannot pass through C. `raise_first` raises it afterwards."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def wrap(self, function: Callable[P, R], otherwise: R) -> Callable[P, R]:
        """Wraps a function for C. otherwise: the return value after an exception, usually "stop" to the C caller."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                self._error = self._error or error
                return otherwise

        return call

    def raise_first(self) -> None:
        """Raises the first kept exception, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error
