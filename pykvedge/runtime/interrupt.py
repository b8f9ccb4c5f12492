"""Handles Ctrl-C during long work: asks the work to stop instead of killing the program."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pykvedge.errors import CancelledError

PATIENCE = 3  # after so many Ctrl-C the program exits, even inside a long C call


def as_exception() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, even if the program was started with SIGINT ignored."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_if_set(event: threading.Event | None, *_: object) -> None:
    """Raises CancelledError if the event is set. Ignores other arguments: progress callbacks have more."""
    if event is not None and event.is_set():
        raise CancelledError


@contextmanager
def as_event(event: threading.Event) -> Iterator[threading.Event]:
    """Makes Ctrl-C set the event inside the block. Changes nothing outside the main thread."""
    event.clear()
    pressed = 0

    def on_interrupt(*_: Any) -> None:
        nonlocal pressed
        pressed += 1
        if pressed >= PATIENCE:
            os._exit(130)
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
