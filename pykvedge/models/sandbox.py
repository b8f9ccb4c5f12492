"""Runs unbounded work in child processes, and ends a child that takes too much time or memory.

One child renders chat templates, another draws PDF pages (models/documents.py). Limits inside this process would not
help: one product or format of a template allocates memory in C, where nothing can be intercepted.

The child of a template starts with the first prompt that needs it, in a tenth of a second, and stays for the
conversation; later prompts cost as much as in this process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from pykvedge.errors import ModelError
from pykvedge.models import template_worker
from pykvedge.models.template_worker import NativeTemplate
from pykvedge.native import libraries
from pykvedge.system import dropped
from pykvedge.system.guard import undoing

PATIENCE = 10.0  # seconds for one prompt
_LOOK_S = 0.05  # seconds between two checks of the child's memory
_MAX_ANSWER = 8 * template_worker.MAX_OUTPUT  # bytes of JSON, in which a character takes up to six
_START = "import sys; sys.path[:] = {path!r}; import runpy; runpy.run_path({worker!r}, run_name='__main__')"


def can_start() -> bool:
    """Returns whether a Python can be started. Programs that embed or pack Python have none that runs a script."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


class Sandbox:
    """Runs one template in a child process, or in this process if no child can start. Not thread-safe."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        """bos, eos: texts of the model's tokens."""
        self._source = source, bos, eos
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, request: Mapping[str, Any]) -> str:
        """Writes a prompt (NativeTemplate.write). Raises ValueError if the template fails, ModelError if the child was
        ended, LibraryError.
        """
        return str(self._ask("write", request))

    def describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the dialect of answers (NativeTemplate.describe). Raises as `write` does."""
        return dict(self._ask("describe", request))

    @functools.cached_property
    def _here(self) -> NativeTemplate:
        return here(*self._source)

    def _ask(self, what: str, request: Mapping[str, Any]) -> Any:
        if not can_start():
            return getattr(self._here, what)(request)
        asked = [[what, request]]
        if self._process is None or self._process.poll() is not None:
            asked.insert(0, [chat_path(), *self._source])
            try:
                self._process = start(template_worker.__file__)
            except OSError as error:
                raise ModelError(f"the model's chat template cannot be run: {error.strerror or error}") from None
            dropped.add(self, functools.partial(end, self._process), at_end=True)
        with undoing(functools.partial(end, self._process)):  # Ctrl-C must not leave an answer for the next request
            line, why = _exchange(self._process, "".join(json.dumps(one) + "\n" for one in asked).encode())
        if line.endswith(b"\n"):
            answer = dict(json.loads(line))
            if "error" in answer:
                raise ValueError(answer["error"])
            if "done" in answer:
                return answer["done"]
            why = answer["fatal"]
        else:
            end(self._process)
        raise ModelError(f"the model's chat template fails: {why}; convert the model again, or use another one")


def here(source: str, bos: str, eos: str) -> NativeTemplate:
    """Reads a template in this process. Raises ValueError, LibraryError."""
    template = NativeTemplate(chat_path(), source, bos, eos)
    dropped.add(template, template.free)
    return template


def chat_path() -> str:
    """Returns the path of libkvedge-chat. Raises LibraryError if kvedge's libraries are missing."""
    return str(libraries.require_dir() / libraries.file_name("kvedge-chat"))


def start(worker: str, *arguments: str, given: Any = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Starts a Python file as a separate program. given: its standard input. Raises OSError."""
    program = _START.format(path=[path for path in sys.path if path], worker=str(Path(worker).resolve()))
    group: Any = {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}
    return subprocess.Popen(
        [sys.executable, "-I", "-c", program, *arguments],
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **group,
    )  # fmt: skip - Ctrl-C at the terminal is not for the child, which would answer nothing


@contextlib.contextmanager
def watched(
    process: subprocess.Popen[bytes], seconds: float, most: int, stop: threading.Event | None = None
) -> Iterator[list[str]]:
    """Kills the child if the block takes longer than `seconds`, the child more than `most` bytes, or `stop` is set.

    Yields a list that then holds the reason. The child's pipes end with it, so nobody waits for them.
    """
    why: list[str] = []
    done = threading.Event()
    last = time.monotonic() + seconds

    def look() -> None:
        while not done.wait(_LOOK_S):
            if time.monotonic() > last:
                why.append(f"the work takes longer than {seconds:.0f} seconds")
            elif _resident(process.pid) > most:
                why.append("the work needs too much memory")
            elif stop is not None and stop.is_set():
                why.append("the work was cancelled")
            if why:
                process.kill()
                return

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield why
    finally:
        done.set()
        watch.join()


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, str]:
    """Sends a request. Returns the answer and a reason. The answer has no line end if the child ended early."""
    line = b""
    with watched(process, PATIENCE, template_worker.MEMORY) as why:
        if process.stdin is not None and process.stdout is not None:
            with contextlib.suppress(OSError, ValueError):  # the child has ended
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline(_MAX_ANSWER)
    return line, why[0] if why else "the process of the template ended"


def _resident(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the child. A second call does nothing."""
    with contextlib.suppress(OSError):
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.wait(5)
