"""Caches objects in memory, limited in bytes. Drops the least recently used first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ByteCache(Generic[T]):
    """Objects by name, at most `limit` bytes together. Threads may share a cache."""

    def __init__(self, limit: int, size: Callable[[Any], int] = len) -> None:
        """size: returns the bytes of an object."""
        self._limit, self._size, self.n_bytes = limit, size, 0  # bytes of all objects
        self._things: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> T | None:
        """Returns the object of this name, or None."""
        with self._lock:
            if name in self._things:
                self._things.move_to_end(name)
            return self._things.get(name)

    def put(self, name: str, thing: T) -> None:
        """Keeps an object. An object larger than the limit is not kept."""
        with self._lock:
            self._pop(name)
            if self._size(thing) > self._limit:
                return
            self._things[name] = thing
            self.n_bytes += self._size(thing)
            while self.n_bytes > self._limit:
                self._pop(next(iter(self._things)))

    def drop(self, name: str) -> None:
        """Drops the object of this name, if it is there."""
        with self._lock:
            self._pop(name)

    def clear(self) -> None:
        with self._lock:
            self._things.clear()
            self.n_bytes = 0

    def _pop(self, name: str) -> None:
        if (old := self._things.pop(name, None)) is not None:
            self.n_bytes -= self._size(old)
