"""Ctrl-C while something long is going on: it asks for an end instead of tearing the program down."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pykvedge.errors import CancelledError

PATIENCE = 3  # so many Ctrl-C end the program even where nothing listens (inside one long C call)


def as_exception() -> None:
    """Ctrl-C raises KeyboardInterrupt, even in a program that was started with the signal ignored."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_if_set(event: threading.Event | None, *_: object) -> None:
    """Raises CancelledError if the event is set; what else is given does not matter."""
    if event is not None and event.is_set():
        raise CancelledError


@contextmanager
def as_event(event: threading.Event) -> Iterator[threading.Event]:
    """Inside the block Ctrl-C sets the event. In another than the main thread nothing changes."""
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
