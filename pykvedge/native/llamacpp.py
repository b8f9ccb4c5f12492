"""Every use of llama.cpp shares this set-up: where its log goes, which CPU cores to use."""

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
from pykvedge.native.calls import Raised
from pykvedge.system import signals

_ERROR, _CONT = 4, 5  # ggml_log_level
_REFUSED = re.compile(r"failed to allocate (?!CPU)(\S+) buffer of size (\d+)")
FULL_DEVICE = "has too little memory"  # in a reason


class _Lines(threading.local):
    """These lines were logged by this thread's calls: llama.cpp logs from the thread that called it."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=50)
        self.level = 0
        self.raised = Raised()  # by what a line was written to


class _Log:
    """This receives llama.cpp's log, keeps the last errors for an exception's message, and prints all if verbose."""

    def __init__(self) -> None:
        self.verbose = False
        self.here = _Lines()

    def receive(self, level: int, text: bytes, _: Any) -> None:
        """Takes a line."""
        self.here.raised.keeping(self._take, None)(level, text)

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
    return libraries.llama().llama_log_callback(_log.receive)  # kept alive by the cache: C goes on calling it


def start(verbose: bool, vision: bool) -> Any:
    """Loads the libraries, directs their log (to stderr if verbose, else nowhere), returns the llama bindings."""
    llama = libraries.llama()
    _log.verbose = verbose
    # each time: other users of llama.cpp in this process may have directed the log elsewhere meanwhile
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
    """Collects the error lines that llama.cpp logs inside the block, in this thread, oldest first.

    What stderr, or the handler of Ctrl-C, raises meanwhile is raised at its end: llama.cpp calls back.
    """
    lines = _log.here.errors
    lines.clear()
    with signals.held():
        yield lines
    _log.here.raised.again()


def reason(lines: deque[str], default: str) -> str:
    """Picks the most telling of llama.cpp's error lines, without the name of the C function that wrote it."""
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
    """Counts the physical cores that this process may run on, or fewer where a control group limits its CPU time."""
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
