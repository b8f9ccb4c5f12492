"""What nobody refers to any more, and nobody closed, is freed by a thread of its own.

An object may be dropped at any moment of any thread, inside a callback of C as well, where nothing of C's may be freed.
So a weak reference puts itself into a queue, which is one step of C, and the thread frees what belongs to it: Ctrl-C in
a finalizer of Python's would reach nobody. A thing refers to what must be freed after it: sessions go before their
models. At the end of the program only what lives on without it is freed, such as child processes.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

Reference = weakref.ref[Any]

_END: Any = None


class _Freeing:
    """One for the process. A child made by fork has no such thread until it makes something to free."""

    def __init__(self) -> None:
        self._gone: SimpleQueue[Any] = SimpleQueue()
        self._frees: dict[int, tuple[Reference, Callable[[], Any], bool]] = {}  # by id of the weak reference
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._look_s: float | None = None  # how often it looks whether something is there: it is woken

    def forked(self) -> None:
        """Goes on in a child made by fork. The queue may count on a thread of the parent's, and wake nobody here."""
        self._lock, self._look_s = threading.Lock(), 0.2

    def add(self, owner: object, free: Callable[[], Any], at_end: bool = False) -> Reference:
        """Calls free() when the owner is dropped, which free must not refer to; `at_end`, or when the program ends.

        Returns what `remove` and `free` take.
        """
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True, name="kvedge-free")
                self._thread.start()
        reference = weakref.ref(owner, self._gone.put)
        self._frees[id(reference)] = reference, free, at_end
        return reference

    def remove(self, reference: Reference | None) -> None:
        """The owner was closed: nothing is left to free. Does nothing for None."""
        self._frees.pop(id(reference), None)

    def free(self, reference: Reference | None) -> None:
        """The owner is closed: frees at once. Does nothing the second time, and for None."""
        found = self._frees.pop(id(reference), None)
        if found is not None:
            found[1]()

    def _run(self) -> None:
        while True:
            try:
                gone = self._gone.get(timeout=self._look_s)
            except Empty:
                continue
            if gone is _END:
                return
            self.free(gone)
            del gone  # what is to be freed next waits for this

    def finish(self) -> None:
        """Waits for what is being freed: C code must not run while the program's libraries end."""
        self._gone.put(_END)
        if self._thread is not None:
            self._thread.join()
        for reference, _, at_end in list(self._frees.values()):
            if at_end:
                self.free(reference)


_freeing = _Freeing()
add, remove, free = _freeing.add, _freeing.remove, _freeing.free
atexit.register(_freeing.finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_freeing.forked)
