"""A Guard lets one thread at a time use native memory. Other threads get an error."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from pykvedge.errors import CancelledError, StateError, UsageError
from pykvedge.system import signals

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_LOOK_S = 0.1  # seconds between two checks for Ctrl-C while another thread leaves


class Guard:
    """A lock for a with statement. The thread inside may enter again; another thread gets a StateError at once.

    User code that the thread inside calls, such as `progress`, gets a StateError too: the object is in the middle of a
    call. Ctrl-C waits until the thread is outside (signals.py).
    """

    def __init__(self, what: str, over: str) -> None:
        """what: the guarded object's name in messages, as in "session". over: the message after it is closed."""
        self.ending = False  # closed, or a thread waits to close
        self._what, self._over = what, over
        self._lock = threading.RLock()
        self._entries: list[tuple[bool, int]] = []  # per with block: results of signals.begin() and outside()

    def __enter__(self) -> Guard:
        began = signals.begin()
        try:
            self._enter(began)
        except StateError:
            signals.end(began)
            raise
        return self

    def _enter(self, began: bool) -> None:
        if not self._lock.acquire(blocking=False):
            raise StateError(
                self._over
                if self.ending
                else f"another thread is using this {self._what}; wait until that thread ends its call, or give each "
                f"thread its own {self._what}"
            )
        refused = ""
        if not self._entries and self.ending:
            refused = self._over
        elif self._entries and self._entries[0][1] != signals.outside():
            refused = (
                f"a callback cannot use this {self._what} during another call of it; use the {self._what} "
                f"after the call"
            )
        if refused:
            self._lock.release()
            raise StateError(refused)
        self._entries.append((began, signals.outside()))

    def __exit__(self, *_: object) -> None:
        began, _level = self._entries.pop()
        self._lock.release()
        signals.end(began)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Refuses new threads, waits until the thread inside has left, and runs the block.

        Raises StateError if the thread inside is the calling thread.
        """
        with signals.held():
            alone = self._lock.acquire(blocking=False)
            if alone and self._entries:
                self._lock.release()
                raise StateError(
                    f"this {self._what} cannot be closed during one of its own calls; close the "
                    f"{self._what} after the call"
                )
            self.ending = True
            while not alone:
                if signals.pending():
                    raise CancelledError
                alone = self._lock.acquire(timeout=_LOOK_S)
            try:
                yield
            finally:
                self._lock.release()


class Stop(threading.Event):
    """An event that long steps check. It is set by `set`, `cancel`, a thread that waits to close, and Ctrl-C."""

    def __init__(self, cancel: threading.Event | None, guard: Guard | None = None) -> None:
        super().__init__()
        self.cancel, self._guard = cancel, guard

    @property
    def cancel(self) -> threading.Event | None:
        """The user's event, or None. Raises UsageError for any other object."""
        return self._cancel

    @cancel.setter
    def cancel(self, event: threading.Event | None) -> None:
        if event is not None and not isinstance(event, threading.Event):
            raise UsageError(f"cancel must be a threading.Event, not {event!r:.40}")
        self._cancel = event

    def is_set(self) -> bool:
        if self._guard is not None and self._guard.ending:
            return True
        return super().is_set() or signals.pending() or (self._cancel is not None and self._cancel.is_set())


class Single:
    """Base class of objects with native memory. They cannot be copied: a copy would free the memory twice."""

    instead = "create another object"

    def __reduce__(self) -> NoReturn:
        raise UsageError(f"{type(self).__name__} cannot be copied or pickled; {self.instead}")


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Calls undo() if the block raises."""
    try:
        yield
    except BaseException:
        undo()
        raise


class Closing:
    """Base class of objects with `close`. They work in a with statement."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()  # type: ignore[attr-defined]


def one_thread(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Returns a method that runs inside its object's `guard`."""

    @functools.wraps(method)
    def inside(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.guard:
            return method(self, *args, **kwargs)

    return inside
