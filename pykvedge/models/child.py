"""A child process does what is not safe to do here, and is ended when it takes too long or too much memory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import psutil

_LOOK_S = 0.05  # between two looks at a child's memory
_START = "import sys; sys.path[:] = {path!r}; import runpy; runpy.run_path({worker!r}, run_name='__main__')"


def can_start() -> bool:
    """Tells whether there is a Python to run. A program that embeds or packs one has none that takes a script."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


class Child:
    """Runs a script that answers a line of JSON for each line of JSON. It is for one thread at a time."""

    def __init__(self, worker: str, memory: int) -> None:
        """worker: the script. memory: bytes that it may have resident. Raises OSError."""
        self._memory = memory
        program = _START.format(path=[path for path in sys.path if path], worker=worker)
        group: Any = {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            **group,
        )  # fmt: skip - Ctrl-C at the terminal is not for the child, which would answer nothing
        self._over = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the child. Does nothing the second time."""
        self._over()

    def ask(self, request: dict[str, Any], patience: float, longest: int) -> tuple[dict[str, Any] | None, str]:
        """Puts a request, and returns its answer; or None, and why the child was ended or has ended.

        patience: seconds for it. longest: bytes of an answer.
        """
        data = json.dumps(request).encode() + b"\n"
        why: list[str] = []
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=(self._process, done, why, patience, self._memory), daemon=True)
        watch.start()
        try:
            line = _exchange(self._process, data, longest)
        finally:
            done.set()
            watch.join()
        if not line.endswith(b"\n"):
            self.close()
            return None, why[0] if why else "it ended the process that it ran in"
        return json.loads(line), ""


def _exchange(process: subprocess.Popen[bytes], request: bytes, longest: int) -> bytes:
    if process.stdin is None or process.stdout is None:
        return b""
    try:
        process.stdin.write(request)
        process.stdin.flush()
        return process.stdout.readline(longest)
    except (OSError, ValueError):  # the child is gone
        return b""


def _watch(
    process: subprocess.Popen[bytes], done: threading.Event, why: list[str], patience: float, memory: int
) -> None:
    """Ends the child when its time is over, or its memory too large."""
    end = time.monotonic() + patience
    while not done.wait(_LOOK_S):
        if time.monotonic() > end:
            why.append(f"it takes longer than {patience:.0f} seconds")
        elif _resident(process.pid) > memory:
            why.append("it takes too much memory")
        if why:
            process.kill()
            return


def _resident(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.wait(5)
