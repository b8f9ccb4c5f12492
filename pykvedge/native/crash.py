"""The last line of a program that native code ends: what happened, and where the conversation is.

No Python runs after a segmentation fault, so the handlers are libkvedge's (kvedge_last_words), which gets the line
beforehand. Until a program calls `arm` nothing happens here.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from pykvedge.errors import KvedgeError, LibraryError, one_line
from pykvedge.native import ggml
from pykvedge.native.calls import call

CODE = 1  # of the process
_NO_MEMORY = ("mem_buffer", "alloc", "out of memory")  # in what ggml asserts on
_HANDSHAKE = "RPC handshake failed"
_HUNG_UP = "Remote RPC server crashed or returned malformed response"


class _LastWords:
    """One for the process, as its signal handlers are."""

    armed = False
    left = "what was not saved is lost"


def arm() -> None:
    """From now on a crash is one line on stderr and exit code 1, where ggml aborts as well.

    For programs of kvedge's. With KVEDGE_DEBUG set nothing is armed: a core file or a debugger tells more.
    """
    if os.environ.get("KVEDGE_DEBUG"):
        return
    with suppress(LibraryError):  # the command itself says what is missing
        ggml.on_abort(_explain)
        _LastWords.armed = True
        left(_LastWords.left)


def left(text: str) -> None:
    """From now on a crash leaves this: "what was parked in DIR is there for the next start"."""
    _LastWords.left = one_line(text)
    if _LastWords.armed:
        with suppress(KvedgeError):  # no line is no reason to stop
            call("last_words", _begin("native code crashed").encode(), f"; {_LastWords.left}".encode(), CODE)


def saved(path: Path) -> None:
    """From now on a crash leaves the conversation in this file."""
    left(f"the conversation up to its last saved answer is in {path}")


def _explain(message: str) -> None:
    """Ends the process where ggml would: its message names the cause."""
    what = " ".join(message.partition(": ")[2].split()) or message
    if any(word in what for word in _NO_MEMORY):
        what = f"not enough memory ({what})"
    if _HUNG_UP in what:
        what = ggml.why_hung_up()
    if _HANDSHAKE in what:
        what += ": the server there is of another version; run this version's kvedge rpc-server"
    os.write(2, f"{_begin('llama.cpp had to stop')}{what}; {_LastWords.left}\n".encode())
    os._exit(CODE)


def _begin(what: str) -> str:
    """Begins the line. At a terminal it is a fresh one, since an answer or a progress bar may stand in the last."""
    fresh = ""
    with suppress(ValueError):  # stderr is closed
        fresh = "\n\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
    return f"{fresh}kvedge: error: {what}: "
