"""A Guard keeps threads apart where native memory is used. One is inside at a time, the others are told."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from pykvedge.errors import StateError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Guard:
    """Use it in a with statement. The thread inside may come in again; another one gets a StateError at once."""

    def __init__(self, what: str, over: str) -> None:
        """what: that is guarded, as in "session". over: the message once it is closed."""
        self.ending = False  # closed, or a thread waits to close
        self._what, self._over = what, over
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> Guard:
        me = threading.get_ident()
        if self._holder != me:
            self._refuse_if_ending()
            if not self._lock.acquire(blocking=False):
                self._refuse_if_ending()
                raise StateError(
                    f"another thread is using this {self._what}; wait until it is done, or give each thread its own"
                )
            self._holder = me
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
            self._lock.release()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Lets nobody in any more, waits until the thread inside has left, and runs the block.

        Raises StateError where that thread is the one that calls.
        """
        if self._holder == threading.get_ident():
            raise StateError(f"this {self._what} is closed from inside one of its own calls; close it afterwards")
        self.ending = True
        with self._lock:
            yield

    def _refuse_if_ending(self) -> None:
        if self.ending:
            raise StateError(self._over)


class Stop(threading.Event):
    """Long steps look at this: it is set when `cancel` says so, or when a thread waits to close."""

    def __init__(self, guard: Guard, cancel: Callable[[], threading.Event | None]) -> None:
        super().__init__()
        self._guard, self._cancel = guard, cancel

    def is_set(self) -> bool:
        cancel = self._cancel()
        return self._guard.ending or (cancel is not None and cancel.is_set())


def one_thread(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Makes a method run inside its object's `guard`."""

    @functools.wraps(method)
    def inside(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.guard:
            return method(self, *args, **kwargs)

    return inside
