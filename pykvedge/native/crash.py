"""What a program says last where native code ends it: which step it was in, and what is left of the conversation.

The handlers are libkvedge's (kvedge-crash.h), since no Python runs after a segmentation fault. They are given the whole
line beforehand, whenever a step begins: that takes some microseconds. Until a program calls `arm` nothing happens here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pykvedge.errors import KvedgeError, LibraryError, one_line
from pykvedge.native import ggml
from pykvedge.native.calls import call

CODE = 1  # of the process
_LOST = "what was not saved is lost"
_NO_MEMORY = ("mem_buffer", "alloc", "out of memory")  # in what ggml asserts on
_HANDSHAKE = "RPC handshake failed"
_HUNG_UP = "Remote RPC server crashed or returned malformed response"


class _LastWords:
    """One for the process, as its signal handlers are."""

    def __init__(self) -> None:
        self.armed = False
        self.left = _LOST
        self.steps: dict[int, str] = {}  # of each thread that is in one
        self._lock = threading.Lock()

    def enter(self, step: str | None) -> str | None:
        """Puts the calling thread into another step. Returns the one that it was in; None stands for none."""
        me = threading.get_ident()
        before = self.steps.get(me)
        if step != before:
            with self._lock:
                if step is None:
                    self.steps.pop(me, None)
                else:
                    self.steps[me] = step
            self.tell()
        return before

    def tell(self) -> None:
        """Gives the line to libkvedge."""
        with suppress(KvedgeError), self._lock:  # without a stack of its own a handler still runs
            call("last_words", f"{self.begin('native code crashed')}: ".encode(), f"; {self.left}".encode(), CODE)

    def begin(self, what: str) -> str:
        """Writes the line up to what happened."""
        steps = " and ".join(dict.fromkeys(list(self.steps.values())))
        return f"{_fresh_line()}kvedge: error: {what}{f' while {steps}' if steps else ''}"


_words = _LastWords()


def arm() -> None:
    """From now on a crash is one line on stderr and exit code 1, where ggml aborts as well.

    For programs of kvedge's. Not with KVEDGE_DEBUG set: a core file or a debugger tells more.
    """
    if os.environ.get("KVEDGE_DEBUG"):
        return
    with suppress(LibraryError):  # the command itself says what is missing
        ggml.on_abort(_explain)
        _words.armed = True
        _words.tell()


def left(text: str = _LOST) -> None:
    """From now on a crash leaves this: "what was parked in DIR is there for the next start"."""
    _words.left = one_line(text)
    if _words.armed:
        _words.tell()


def saved(path: Path) -> None:
    """From now on a crash leaves the conversation in this file."""
    left(f"the conversation up to its last saved answer is in {path}")


def now(step: str | None) -> str | None:
    """Says what the calling thread begins to do, as in "the prompt was read"; None: nothing. Returns what it did."""
    return _words.enter(step) if _words.armed else None


@contextmanager
def step(what: str) -> Iterator[None]:
    """Says what the calling thread does inside the block."""
    before = now(what)
    try:
        yield
    finally:
        now(before)


def _explain(message: str) -> None:
    """Ends the process where ggml would: its message names the cause."""
    what = " ".join(message.partition(": ")[2].split()) or message
    if any(word in what for word in _NO_MEMORY):
        what = f"not enough memory ({what})"
    if _HUNG_UP in what:
        what = ggml.why_hung_up()
    if _HANDSHAKE in what:
        what += ": the server there is of another version; run this version's kvedge rpc-server"
    os.write(2, f"{_words.begin('llama.cpp had to stop')}: {what}; {_words.left}\n".encode())
    os._exit(CODE)


def _fresh_line() -> str:
    """At a terminal a line may be half full, of an answer or of a progress bar, which hides the cursor."""
    try:
        return "\n\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
    except ValueError:  # closed
        return ""
