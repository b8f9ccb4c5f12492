"""Delays the exception of the Ctrl-C handler while native memory is used, and raises it once after the call.

KeyboardInterrupt between two steps of a call would leave a lock or a half-changed conversation behind; in a callback
of C it would reach nobody. Instead, long steps check `pending` and end, as for a `cancel` event. Handlers that raise
nothing run at once. All this is about the main thread, in which Python runs handlers.
"""

from __future__ import annotations

# signal's C functions without its enums, which take 20 us
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from pykvedge.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_NOTHING: Any = object()


class _Here(threading.local):
    """Data of each thread. before: the replaced handler. raised: its exception. outside: depth of user code calls."""

    before: Any = None
    raised: BaseException | None = None
    outside = 0


_here = _Here()


def pending() -> bool:
    """Returns whether an exception of the handler waits for the end of this thread's call."""
    return _here.raised is not None


def outside() -> int:
    """Returns the depth of calls of user code, such as `progress`, in this thread."""
    return _here.outside


def begin() -> bool:
    """Delays the handler's exceptions from now on. Returns the argument for `end`."""
    before = _signal.getsignal(_signal.SIGINT)
    if before is _keep or not callable(before) or threading.get_ident() != threading.main_thread().ident:
        return False
    _here.before, _here.raised = before, None
    _signal.signal(_signal.SIGINT, _keep)  # from here on the handler raises nothing
    return True


def end(began: bool) -> None:
    """Ends the delay and raises the exception that waits. began: the result of `begin`."""
    if not began:
        return
    if _signal.getsignal(_signal.SIGINT) is _keep:  # otherwise user code has installed another handler
        _signal.signal(_signal.SIGINT, _here.before)
    _raise_what_waits()


class held(ContextDecorator):  # noqa: N801 - used like a keyword of a with statement
    """Delays the handler's exceptions to the end of a block, or of a decorated function."""

    def _recreate_cm(self) -> held:
        return held()

    def __enter__(self) -> None:
        self._began = begin()

    def __exit__(self, *_: object) -> None:
        end(self._began)


class lifted:  # noqa: N801
    """A block for user code, in which the handler raises at once."""

    def __enter__(self) -> None:
        in_main = threading.get_ident() == threading.main_thread().ident
        self._began = in_main and _signal.getsignal(_signal.SIGINT) is _keep
        if self._began:
            _raise_what_waits()
            _signal.signal(_signal.SIGINT, _here.before)
        self._level = _here.outside
        _here.outside = self._level + 1

    def __exit__(self, *_: object) -> None:
        _here.outside = self._level
        if self._began:
            begin()


def lifting(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a user's function that runs in a `lifted` block. Raises UsageError if it is not callable."""
    if not callable(function):
        raise UsageError(f"progress must be a function (what, share done), not {function!r:.40}")

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with lifted():
            return function(*args, **kwargs)

    return call


def items(given: Iterable[T]) -> Iterator[T]:
    """Yields the items of a user's iterable. Each item is computed in a `lifted` block."""
    with lifted():
        iterator = iter(given)
    while True:
        with lifted():
            item = next(iterator, _NOTHING)
        if item is _NOTHING:
            return
        yield item


def _keep(number: int, frame: FrameType | None) -> None:
    try:
        _here.before(number, frame)
    except BaseException as error:
        _here.raised = error


def _raise_what_waits() -> None:
    raised, _here.raised = _here.raised, None
    if raised is not None:
        raise raised.with_traceback(None) from None
