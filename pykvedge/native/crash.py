"""Prints a last line when native code ends the program: what happened, and where the conversation is.

No Python runs after a segmentation fault, so libkvedge has the signal handlers and gets the line in advance
(kvedge_last_words). Inactive until a program calls `arm`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from pykvedge.errors import NO_THREAD, KvedgeError, LibraryError, one_line
from pykvedge.native import ggml
from pykvedge.native.calls import call

CODE = 1  # exit code of the process
_NO_MEMORY = ("mem_buffer", "alloc", "out of memory")  # words in ggml's assertion messages
_THREAD_ASSERTION = "GGML_ASSERT(rc == 0)"  # ggml's, if the system refuses a thread
_HANDSHAKE = "RPC handshake failed"
_HUNG_UP = "Remote RPC server crashed or returned malformed response"


class _LastWords:
    """State of the process: signal handlers are per process too."""

    armed = False
    left = "everything that was not saved is lost"


def arm() -> None:
    """Makes a crash, or an abort of ggml, end with one line on stderr and exit code 1.

    For kvedge's programs. Does nothing if KVEDGE_DEBUG is set: a core file or a debugger tells more.
    """
    if os.environ.get("KVEDGE_DEBUG"):
        return
    with suppress(LibraryError):  # the command will report the missing library
        ggml.on_abort(_explain)
        _LastWords.armed = True
        left(_LastWords.left)


def left(text: str) -> None:
    """Sets the text after a crash: what is not lost, such as "what was parked in DIR is there for the next start"."""
    _LastWords.left = one_line(text)
    if _LastWords.armed:
        with suppress(KvedgeError):  # the program can run without a last line
            call("last_words", _begin("native code crashed").encode(), f"; {_LastWords.left}".encode(), CODE)


def saved(path: Path) -> None:
    """Sets the text after a crash: the conversation is in this file."""
    left(f"the conversation up to its last saved answer is in {path}")


def _explain(message: str) -> None:
    """Prints ggml's message, which names the cause, and ends the process."""
    what = " ".join(message.partition(": ")[2].split()) or message
    if any(word in what for word in _NO_MEMORY):
        what = f"not enough memory ({what})"
    if _THREAD_ASSERTION in what:
        what = f"{NO_THREAD} ({what})"
    if _HUNG_UP in what:
        what = ggml.why_hung_up()
    if _HANDSHAKE in what:
        what += ": the RPC server has another version; run kvedge rpc-server of this version"
    os.write(2, f"{_begin('llama.cpp had to stop')}{what}; {_LastWords.left}\n".encode())
    os._exit(CODE)


def _begin(what: str) -> str:
    """Returns the beginning of the line. On a terminal it starts a new line, below an answer or a progress bar."""
    fresh = ""
    with suppress(ValueError):  # stderr is closed
        fresh = "\n\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
    return f"{fresh}kvedge: error: {what}: "
