"""What nobody refers to any more, and nobody closed, is freed by a thread of its own.

An object may be dropped at any moment of any thread, inside a callback of C as well, where nothing of C's may be freed.
So a weak reference puts itself into a queue, which is one step of C, and the thread frees what belongs to it. A thing
refers to what must be freed after it: sessions go before their models. At the end of the program nothing is freed.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_END: Any = None


class _Freeing:
    """One for the process. A child made by fork has no such thread until it makes something to free."""

    def __init__(self) -> None:
        self._gone: SimpleQueue[Any] = SimpleQueue()
        self._frees: dict[int, tuple[Any, Callable[[], None]]] = {}  # by id of the weak reference, which is kept here
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, owner: object, free: Callable[[], None]) -> int:
        """Calls free() when the owner is dropped, which free must not refer to. Returns what `remove` takes."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True, name="kvedge-free")
                self._thread.start()
        reference = weakref.ref(owner, self._gone.put)
        self._frees[id(reference)] = reference, free
        return id(reference)

    def remove(self, number: int) -> None:
        """The owner was closed: nothing is left to free."""
        self._frees.pop(number, None)

    def _run(self) -> None:
        while True:
            gone = self._gone.get()
            if gone is _END:
                return
            found = self._frees.pop(id(gone), None)
            if found is not None:
                found[1]()
            del gone, found  # what is to be freed next waits for these

    def finish(self) -> None:
        """Waits for what is being freed: C code must not run while the program's libraries end."""
        self._gone.put(_END)
        if self._thread is not None:
            self._thread.join()


_freeing = _Freeing()
add, remove = _freeing.add, _freeing.remove
atexit.register(_freeing.finish)
