"""Defines every error that kvedge raises on purpose. All derive from KvedgeError.

`exit_code` is the exit code of the command line: 2 for an invalid request, 1 for a valid request that failed. A message
is one line that says what is wrong and what to do.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence


class KvedgeError(Exception):
    """Base of all errors of kvedge."""

    exit_code = 1


class KvedgeWarning(UserWarning):
    """Something requested does not hold, and the work continues without it."""


class UsageError(KvedgeError, ValueError):
    """The request is invalid."""

    exit_code = 2


class UnknownNameError(UsageError):
    """Unknown name of a method, stage member or setting."""


class BudgetError(UsageError):
    """A budget that is impossible: zero, negative, a ratio above 1, or below the protected tokens."""


class ArrayError(UsageError):
    """An array with an invalid shape, type or value."""


class GrammarError(UsageError):
    """An invalid grammar or JSON schema, or a grammar that an answer cannot follow."""


class ProfileError(UsageError):
    """A calibrated profile that is missing, damaged, or for another model."""


class ModelError(KvedgeError):
    """A model or mmproj file that is unreadable or damaged, or two files that do not fit together."""


class HubError(KvedgeError):
    """A model requested by name is not available: the hub is unreachable or refuses, or the download is damaged."""


class UnreachableError(HubError):
    """The hub did not answer properly. The cache may help (--offline)."""


class ImageError(KvedgeError):
    """An image that is unreadable or too large."""


class ContextError(KvedgeError):
    """A prompt that does not fit the context. n_tokens: of the prompt, at least. n_ctx: of the context. 0: unknown."""

    def __init__(self, message: str = "", n_tokens: int = 0, n_ctx: int = 0) -> None:
        super().__init__(message)
        self.n_tokens, self.n_ctx = n_tokens, n_ctx


class OutOfMemoryError(KvedgeError, MemoryError):
    """The machine lacks memory for the request."""


class NothingToCompressError(KvedgeError):
    """The model has no attention layer whose KV memory kvedge can take over."""


class StateError(KvedgeError):
    """A call that the present state of the session or the cache does not allow."""


class UnsupportedError(KvedgeError):
    """The model or batch needs something that this version does not support."""


class PluginError(KvedgeError):
    """A plugin that cannot be loaded, or a plugin's stage that failed or returned an invalid result."""


class SessionFileError(KvedgeError):
    """A session file that is unreadable, unwritable, damaged, too new, or for another model."""


class UnsoundError(KvedgeError):
    """A check of kvedge doctor completed with a wrong result."""


class DeviceError(KvedgeError):
    """A GPU or RPC server that is unusable: it does not answer, or lends no device."""


class LibraryError(KvedgeError):
    """The shared libraries are missing or too old, or other libraries were loaded first."""


class CancelledError(KvedgeError):
    """The caller's `cancel` event stopped a long operation."""

    exit_code = 130  # as after Ctrl-C

    def __init__(self, message: str = "the operation was cancelled") -> None:
        super().__init__(message)


class RequestError(KvedgeError):
    """An HTTP request that is refused, or an answer that cannot continue.

    status: HTTP status. code: a word for programs. param: the invalid field. retry_s: seconds before a retry; 0: no
    retry. figures: more fields of the error, for programs.
    """

    figures: Mapping[str, int] = {}

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_s = status, message, code, param, retry_s


class SaveError(KvedgeError):
    """A file of results that cannot be written, or not completely."""


class DatasetError(UsageError):
    """A data set that is unusable."""


class BrokenRuleError(KvedgeError, AssertionError):
    """A method that breaks a rule of `kvedge methods --check`."""


NO_MEMORY = "not enough memory; close other programs or use a smaller model"
NO_THREAD = (
    "the system refuses another thread: not enough memory, or a limit of processes (ulimit -u, or pids.max of a "
    "container); raise the limit"
)
_MAX_SHOWN = 2000  # most characters of a message


def lacking(error: Exception) -> str:
    """Returns what the system lacks if Python has no named error for it: memory or a thread. "": something else."""
    if isinstance(error, MemoryError):
        return NO_MEMORY
    return NO_THREAD if isinstance(error, RuntimeError) and "can't start new thread" in str(error) else ""


def printable(text: str) -> str:
    """Escapes non-printable characters except line breaks: names and model texts may contain terminal commands."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(message: object) -> str:
    """Returns an error's message as one printable line, shortened if long. Never raises."""
    try:
        text = str(message)
    except Exception:
        text = f"{type(message).__name__} (its text is not available)"
    text = " ".join(printable(" ".join(text.split())).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]} ... {text[-_MAX_SHOWN // 2 :]}"


def unknown(kind: str, name: str, known: Iterable[str], also: Sequence[str] = ()) -> UnknownNameError:
    """Returns an UnknownNameError for `name` that suggests the nearest known name. also: possible reasons to add."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    hint = f"did you mean '{near[0]}'?" if near else "known: " + ", ".join(names) if names else f"no {kind} is known"
    return UnknownNameError("; ".join([f"unknown {kind} '{name}'", hint, *also]))


def check_number(name: str, value: object, whole: bool = True) -> None:
    """Raises UsageError for a value that is no number, or (whole) no integer. True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
        raise UsageError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r:.40}")
