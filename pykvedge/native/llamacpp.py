"""Sets llama.cpp up for the whole package: its log, its errors, the number of threads."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from pykvedge.native import libraries
from pykvedge.native.calls import CallbackErrors
from pykvedge.system import signals

_ERROR, _CONT = 4, 5  # ggml_log_level
_REFUSED = re.compile(r"failed to allocate (?!CPU)(\S+) buffer of size (\d+)")
FULL_DEVICE = "has too little memory"  # part of a reason text


class _Lines(threading.local):
    """Log lines of this thread's calls: llama.cpp logs in the thread that called it."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=50)
        self.level = 0
        self.callback_errors = CallbackErrors()  # errors of writing a line


class _Log:
    """Receives llama.cpp's log. Keeps the last error lines for exceptions, and prints all lines if verbose."""

    def __init__(self) -> None:
        self.verbose = False
        self.here = _Lines()

    def receive(self, level: int, text: bytes, _: Any) -> None:
        """Takes one line. Called by llama.cpp."""
        self.here.callback_errors.wrap(self._take, None)(level, text)

    def _take(self, level: int, text: bytes) -> None:
        line, here = text.decode("utf-8", "replace"), self.here
        if level != _CONT:
            here.level = level
        if here.level == _ERROR and line.strip():
            here.errors.append(line.strip())
        if self.verbose and sys.stderr is not None:
            sys.stderr.write(line)


_log = _Log()


@functools.cache
def _log_callback() -> Any:
    return libraries.llama().llama_log_callback(_log.receive)  # the cache keeps the callback alive for C


def start(verbose: bool, vision: bool) -> Any:
    """Loads the libraries, sends their log to stderr if verbose (else nowhere), and returns the llama bindings."""
    llama = libraries.llama()
    _log.verbose = verbose
    # every time: another user of llama.cpp in this process may have redirected the log
    llama.llama_log_set(_log_callback(), None)
    libraries.load_backends()
    _init_backend()
    if vision:
        libraries.mtmd().mtmd_helper_log_set(_log_callback(), None)
    return llama


@functools.cache
def _init_backend() -> None:
    libraries.llama().llama_backend_init()


@contextmanager
def collected_errors() -> Iterator[deque[str]]:
    """Collects the error lines that llama.cpp logs in this thread during the block, the oldest first.

    Delays exceptions of stderr and of the Ctrl-C handler to the block's end, because they cannot pass through C.
    """
    lines = _log.here.errors
    lines.clear()
    with signals.held():
        yield lines
    _log.here.callback_errors.raise_first()


def reason(lines: deque[str], default: str) -> str:
    """Returns the first meaningful line of llama.cpp's error lines, without the name of its C function."""
    for line in lines:
        text = line.rpartition("error: ")[2] if "error: " in line else line
        head, colon, tail = text.partition(": ")
        if colon and " " not in head:
            text = tail
        text = " ".join(text.split()).replace("std::bad_alloc", "not enough memory")
        text = _REFUSED.sub(rf"the device \1 {FULL_DEVICE} for \2 bytes more", text)
        if text:
            return text
    return default


def default_threads() -> int:
    """Returns the number of physical cores of this process, or less if a control group limits its CPU time."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:
        return psutil.cpu_count(logical=False) or 1
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, min(len(cores), _cpu_quota()))


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _cpu_quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16
