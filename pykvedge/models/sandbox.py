"""A child process renders the templates whose work is not bounded, and is ended when it takes too long or too much.

Bounds inside of this process would not do: a single product or format of a template allocates without end in C, where
nothing can be intercepted. The child starts with the first such prompt, which takes a tenth of a second, and stays for
the conversation; a prompt then costs what it costs here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
from jinja2 import TemplateError

from pykvedge.errors import ModelError
from pykvedge.models import jinja_worker

PATIENCE = 10.0  # seconds for one prompt
_LOOK_S = 0.05  # between two looks at a child's memory
_MOST_ANSWER = 8 * jinja_worker.MOST_OUTPUT  # bytes of JSON, where a character may be six

_START = "import sys; sys.path[:] = {path!r}; import runpy; runpy.run_path({worker!r}, run_name='__main__')"


def can_start() -> bool:
    """Tells whether there is a Python to run. A program that embeds or packs one has none that takes a script."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


class Sandbox:
    """Renders one template in a child process. It is for one thread at a time."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, values: dict[str, Any]) -> str:
        """Raises TemplateError, as the template does; ModelError where the template had to be ended."""
        child = self._running()
        request = json.dumps({"source": self._source, "values": values}).encode() + b"\n"
        why: list[str] = []
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=(child, done, why), daemon=True)
        watch.start()
        try:
            line = _exchange(child, request)
        finally:
            done.set()
            watch.join()
        if not line.endswith(b"\n"):
            _end(child)
            raise ModelError(_failed(why[0] if why else "it ended the process that it ran in"))
        answer = json.loads(line)
        if "error" in answer:
            raise TemplateError(answer["error"])
        if "fatal" in answer:
            raise ModelError(_failed(answer["fatal"]))
        return str(answer["text"])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._child = _start()
            weakref.finalize(self, _end, self._child)
        return self._child


def _failed(why: str) -> str:
    return f"the model's chat template fails: {why}; convert the model again, or use another one"


def _start() -> subprocess.Popen[bytes]:
    worker = str(Path(jinja_worker.__file__).resolve())
    program = _START.format(path=[path for path in sys.path if path], worker=worker)
    group: Any = {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            **group,
        )  # fmt: skip - Ctrl-C at the terminal is not for the child, which would answer nothing
    except OSError as error:
        raise ModelError(f"the model's chat template cannot be run: {error.strerror or error}") from None


def _exchange(child: subprocess.Popen[bytes], request: bytes) -> bytes:
    if child.stdin is None or child.stdout is None:
        return b""
    try:
        child.stdin.write(request)
        child.stdin.flush()
        return child.stdout.readline(_MOST_ANSWER)
    except (OSError, ValueError):  # the child is gone
        return b""


def _watch(child: subprocess.Popen[bytes], done: threading.Event, why: list[str]) -> None:
    """Ends the child when its time is over, or its memory too large."""
    end = time.monotonic() + PATIENCE
    while not done.wait(_LOOK_S):
        if time.monotonic() > end:
            why.append(f"it takes longer than {PATIENCE:.0f} seconds")
        elif _resident(child.pid) > jinja_worker.MEMORY:
            why.append("it takes too much memory")
        if why:
            child.kill()
            return


def _resident(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        child.wait(5)
