"""Frees the native memory of objects that were dropped without a close, in a separate thread.

An object may be dropped at any moment in any thread, even inside a callback of C, where C memory must not be freed.
A weak reference therefore enters a queue, in one step of C, and the thread frees the memory. Ctrl-C in a Python
finalizer would reach nobody. An object refers to the objects that must be freed after it: sessions are freed before
their models. At the end of the program, only resources that outlive it are freed, for example child processes.
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
    """The queue and its thread, one per process. A forked child starts a thread when it first adds an owner."""

    def __init__(self) -> None:
        self._gone: SimpleQueue[Any] = SimpleQueue()
        self._frees: dict[int, tuple[Reference, Callable[[], Any], bool]] = {}  # by id of the weak reference
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._look_s: float | None = None  # interval of looking into the queue; None: the queue wakes the thread

    def forked(self) -> None:
        """Resets the state in a forked child. The queue may rely on a thread of the parent and not wake this one."""
        self._lock, self._look_s = threading.Lock(), 0.2

    def add(self, owner: object, free: Callable[[], Any], at_end: bool = False) -> Reference:
        """Calls free() when the owner is dropped; free must not refer to the owner. at_end: also when the program ends.

        Returns the reference for `remove` and `free`.
        """
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, daemon=True, name="kvedge-free")
                thread.start()  # fails at the system's limit of threads
                self._thread = thread
        reference = weakref.ref(owner, self._gone.put)
        self._frees[id(reference)] = reference, free, at_end
        return reference

    def remove(self, reference: Reference | None) -> None:
        """Forgets an owner that was closed. Does nothing for None."""
        self._frees.pop(id(reference), None)

    def free(self, reference: Reference | None) -> None:
        """Frees the memory of an owner that is closed now. Does nothing a second time, or for None."""
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
            del gone  # objects that are freed next wait for this reference

    def finish(self) -> None:
        """Waits for the thread: C code must not run while the program's libraries are unloaded."""
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
