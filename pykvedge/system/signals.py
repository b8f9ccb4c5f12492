"""What the handler of Ctrl-C raises waits while native memory is used, and is raised when the call is over, once.

Raised between two steps of a call, KeyboardInterrupt would leave a lock or a half-changed conversation behind; inside a
callback of C it would reach nobody. Instead, long steps look at `pending` and end, as they do for a `cancel` event.
Handlers that raise nothing run at once. All this is about the main thread, the one in which Python runs handlers.
"""

from __future__ import annotations

# the functions of `signal` without its enums, which take 20 us
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
    """Of each thread. before: the handler that was replaced. raised: by it, meanwhile. outside: calls of user code."""

    before: Any = None
    raised: BaseException | None = None
    outside = 0


_here = _Here()


def pending() -> bool:
    """Tells whether an exception of the handler waits for the end of this thread's call."""
    return _here.raised is not None


def outside() -> int:
    """Counts the calls of user code, as of `progress`, that this thread is inside of."""
    return _here.outside


def begin() -> bool:
    """From now on what the handler raises waits. Returns what `end` is to be given."""
    before = _signal.getsignal(_signal.SIGINT)
    if before is _keep or not callable(before) or threading.get_ident() != threading.main_thread().ident:
        return False
    _here.before, _here.raised = before, None
    _signal.signal(_signal.SIGINT, _keep)  # from here on nothing is raised between two steps
    return True


def end(began: bool) -> None:
    """Raises what has waited since the `begin` that returned True."""
    if not began:
        return
    if _signal.getsignal(_signal.SIGINT) is _keep:  # else somebody has another handler by now
        _signal.signal(_signal.SIGINT, _here.before)
    _raise_what_waits()


class held(ContextDecorator):  # noqa: N801 - a word of a with statement
    """What the handler raises inside the block, or the function that this decorates, is raised at its end."""

    def _recreate_cm(self) -> held:
        return held()

    def __enter__(self) -> None:
        self._began = begin()

    def __exit__(self, *_: object) -> None:
        end(self._began)


class lifted:  # noqa: N801
    """Inside the block user code runs, in which the handler raises at once."""

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
    """Makes a function of the user's run in a `lifted` block. Raises UsageError for what is no function."""
    if not callable(function):
        raise UsageError(f"progress must be a function (what, share done), not {function!r:.40}")

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with lifted():
            return function(*args, **kwargs)

    return call


def items(given: Iterable[T]) -> Iterator[T]:
    """Yields the items of an iterable of the user's, which computes each in a `lifted` block."""
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
