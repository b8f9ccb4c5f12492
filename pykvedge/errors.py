"""Every error that kvedge raises on purpose. All of them derive from KvedgeError.

`exit_code` is what the command line returns: 2 when the request itself is wrong, 1 when a correct request failed.
Messages are one line, say what is wrong and what to do about it.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence


class KvedgeError(Exception):
    """Base of all errors of kvedge."""

    exit_code = 1


class KvedgeWarning(UserWarning):
    """Something that was asked for is not so, and the work goes on without it."""


class UsageError(KvedgeError, ValueError):
    """The request cannot be carried out as it was written."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A method, stage member or setting of that name does not exist."""


class BudgetError(UsageError):
    """A budget that cannot be met: zero, negative, above 1 as a ratio, below the protected tokens."""


class ArrayError(UsageError):
    """An array whose shape, type or values cannot be used."""


class GrammarError(UsageError):
    """A grammar or JSON schema that cannot be used, or that an answer cannot follow."""


class ProfileError(UsageError):
    """A calibrated profile that is missing, damaged, or of another model."""


class ModelError(KvedgeError):
    """A model or mmproj file that cannot be read, is damaged, or does not fit."""


class HubError(KvedgeError):
    """A model that was asked for by name cannot be had: the hub does not answer or refuses, or it came damaged."""


class UnreachableError(HubError):
    """The hub did not answer, or not as one does; what is in the cache may do instead (--offline)."""


class ImageError(KvedgeError):
    """An image that cannot be read or is too large."""


class ContextError(KvedgeError):
    """A prompt that does not fit into the context. n_tokens: of it, at least; n_ctx: that there are; 0: not known."""

    def __init__(self, message: str = "", n_tokens: int = 0, n_ctx: int = 0) -> None:
        super().__init__(message)
        self.n_tokens, self.n_ctx = n_tokens, n_ctx


class OutOfMemoryError(KvedgeError, MemoryError):
    """The machine has not enough memory for what was asked."""


class NothingToCompressError(KvedgeError):
    """The model has no attention layer whose KV memory kvedge can take over."""


class StateError(KvedgeError):
    """A call that does not fit the state of the session or the cache."""


class UnsupportedError(KvedgeError):
    """The model or batch asks for something that this version cannot do."""


class PluginError(KvedgeError):
    """A plugin that cannot be loaded, or a stage of one that failed or returned what cannot be used."""


class SessionFileError(KvedgeError):
    """A session file that cannot be read or written, is damaged, too new, or of another model."""


class UnsoundError(KvedgeError):
    """A check of kvedge doctor came to its end with a wrong result."""


class DeviceError(KvedgeError):
    """A GPU or another machine that cannot be used: nobody answers, or it has nothing to lend."""


class LibraryError(KvedgeError):
    """The shared libraries are missing, too old, or others were loaded first."""


class CancelledError(KvedgeError):
    """The caller's `cancel` event was set while something long was going on."""

    exit_code = 130  # as after Ctrl-C

    def __init__(self, message: str = "cancelled before it was done") -> None:
        super().__init__(message)


class RequestError(KvedgeError):
    """A request over HTTP that is refused, or whose answer cannot go on.

    status: of the response. code: a word for programs. param: the field that is wrong. retry_s: seconds after which it
    may be tried again; 0: never. figures: more fields of the error, for programs.
    """

    figures: Mapping[str, int] = {}

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_s = status, message, code, param, retry_s


class SaveError(KvedgeError):
    """A file of results that cannot be written, or not any further."""


class DatasetError(UsageError):
    """A data set that cannot be used."""


class BrokenRuleError(KvedgeError, AssertionError):
    """A method that does what none may do: `kvedge methods --check` found it."""


_MOST_SHOWN = 2000  # characters of a message


def printable(text: str) -> str:
    """Writes out what is no letter, sign or blank: a name or a model's text may hold commands for a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(message: object) -> str:
    """Makes the line that is shown of an error, whatever it says, and if it cannot even be asked."""
    try:
        text = str(message)
    except Exception:
        text = f"{type(message).__name__}, which cannot be written"
    text = " ".join(printable(" ".join(text.split())).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN // 2]} ... {text[-_MOST_SHOWN // 2 :]}"


def unknown(kind: str, name: str, known: Iterable[str], also: Sequence[str] = ()) -> UnknownNameError:
    """An UnknownNameError for `name` that suggests the nearest of the known names. also: what may be the reason."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    hint = f"did you mean '{near[0]}'?" if near else "known: " + ", ".join(names) if names else "there are none"
    return UnknownNameError("; ".join([f"unknown {kind} '{name}'", hint, *also]))


def check_number(name: str, value: object, whole: bool = True) -> None:
    """Raises UsageError if a setting is no number, or not a whole one; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
        raise UsageError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r:.40}")
