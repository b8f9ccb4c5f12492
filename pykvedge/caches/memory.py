"""Bytes in memory under a bound: what was used longest ago goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sized
from typing import Generic, TypeVar

T = TypeVar("T", bound=Sized)


class ByteCache(Generic[T]):
    """Things by name, of `limit` bytes at most, as their len() counts. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._things: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """So many bytes are held now."""
        return self._held

    def get(self, name: str) -> T | None:
        """Returns what was put under this name, if it is still there."""
        with self._lock:
            if name in self._things:
                self._things.move_to_end(name)
            return self._things.get(name)

    def put(self, name: str, thing: T) -> None:
        """Keeps a thing. One that is larger than the bound is not kept."""
        with self._lock:
            if (old := self._things.pop(name, None)) is not None:
                self._held -= len(old)
            if len(thing) > self._limit:
                return
            self._things[name] = thing
            self._held += len(thing)
            while self._held > self._limit:
                self._held -= len(self._things.popitem(last=False)[1])
