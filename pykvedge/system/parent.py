"""Ends a program together with the program that started it."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator

import psutil

_LOOK_S = 1.0  # seconds between two checks of the parent


@contextlib.contextmanager
def watched(parent: int, ended: threading.Event) -> Iterator[None]:
    """Sets the event when the parent ends, or when stdin ends if stdin is a pipe.

    parent: its process number; 0: no parent.
    """
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(psutil.Error):  # the parent has already ended
            process = psutil.Process(parent)
            while not over.wait(_LOOK_S):
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    break
        ended.set()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        ended.set()

    if parent:
        threading.Thread(target=watch, daemon=True, name="kvedge-parent").start()
        if _is_pipe(0):
            threading.Thread(target=read, daemon=True, name="kvedge-stdin").start()
    try:
        yield
    finally:
        over.set()


def _is_pipe(number: int) -> bool:
    try:
        mode = os.fstat(number).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
