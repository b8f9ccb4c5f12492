"""Bytes in memory under a bound: what was used longest ago goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ByteCache(Generic[T]):
    """Things by name, of `limit` bytes at most. Threads may share it."""

    def __init__(self, limit: int, size: Callable[[Any], int] = len) -> None:
        """size: counts the bytes of a thing."""
        self._limit, self._size, self.n_bytes = limit, size, 0  # that are held
        self._things: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> T | None:
        """Returns what was put under this name, if it is still there."""
        with self._lock:
            if name in self._things:
                self._things.move_to_end(name)
            return self._things.get(name)

    def put(self, name: str, thing: T) -> None:
        """Keeps a thing. One that is larger than the bound is not kept."""
        with self._lock:
            self._pop(name)
            if self._size(thing) > self._limit:
                return
            self._things[name] = thing
            self.n_bytes += self._size(thing)
            while self.n_bytes > self._limit:
                self._pop(next(iter(self._things)))

    def drop(self, name: str) -> None:
        """Frees what was put under this name, if it is still there."""
        with self._lock:
            self._pop(name)

    def clear(self) -> None:
        with self._lock:
            self._things.clear()
            self.n_bytes = 0

    def _pop(self, name: str) -> None:
        if (old := self._things.pop(name, None)) is not None:
            self.n_bytes -= self._size(old)
