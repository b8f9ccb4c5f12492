"""Tunes the model while its server is idle, by a separate `kvedge tune` process.

The process ends when a request comes. Its figures stay in a file, so the next process continues from them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from pykvedge.serve.scheduler import Scheduler

_IDLE_S = 30.0  # seconds without a request before tuning starts
_LOOK_S = 0.1  # seconds between two checks of the server
_END_S = 10.0  # seconds for the process to end by itself
_STOPPED = 130  # exit code of an interrupted process
_NICE = psutil.IDLE_PRIORITY_CLASS if sys.platform == "win32" else 19


@contextlib.contextmanager
def tuning(scheduler: Scheduler, arguments: Sequence[str], say: Callable[[str], None]) -> Iterator[None]:
    """Tunes in idle time during the block. arguments: of `kvedge tune`; empty: no tuning. say: prints a line."""
    over = threading.Event()
    thread = threading.Thread(target=_run, args=(scheduler, arguments, say, over), daemon=True, name="kvedge-tune")
    if arguments:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if arguments:
            thread.join()


def _run(scheduler: Scheduler, arguments: Sequence[str], say: Callable[[str], None], over: threading.Event) -> None:
    code, told = _STOPPED, ""
    say(f"kvedge tunes the model after {_IDLE_S:g} s without a request, and pauses at the next request")
    while code == _STOPPED and _idle(scheduler, over):
        try:
            code, told = _tune(scheduler, arguments, over)
        except OSError as error:
            code, told = 1, f"tuning cannot start: {error.strerror or error}"
    if code == 0:
        say("tuning is complete; the server uses the plan after its next start (kvedge tune --show)")
    elif code != _STOPPED:
        say(told.removeprefix("kvedge: ") or f"tuning ended with exit code {code}")


def _idle(scheduler: Scheduler, over: threading.Event) -> bool:
    """Waits until the server was idle for a while. Returns False if the server ends first."""
    last, seen = time.monotonic(), _ended(scheduler)
    while not over.wait(_LOOK_S):
        if _asked(scheduler, seen):
            last, seen = time.monotonic(), _ended(scheduler)
        elif time.monotonic() - last >= _IDLE_S:
            return True
    return False


def _ended(scheduler: Scheduler) -> int:
    return sum(scheduler.counts.finished.values())


def _asked(scheduler: Scheduler, seen: int) -> bool:
    """Returns whether a request is active, or ended since `seen` was counted."""
    return bool(scheduler.busy or scheduler.waiting or _ended(scheduler) != seen)


def _tune(scheduler: Scheduler, arguments: Sequence[str], over: threading.Event) -> tuple[int, str]:
    """Runs the tuning until a request comes, or to its end. Returns exit code, last line of stderr. Raises OSError."""
    command = [sys.executable, "-m", "pykvedge", "tune", "--quiet", "--parent-pid", str(os.getpid()), *arguments]
    seen, nothing = _ended(scheduler), subprocess.DEVNULL
    with (
        tempfile.TemporaryFile() as told,
        # a new process session: Ctrl-C at the terminal reaches only the server
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=told, start_new_session=True) as child,
    ):
        with contextlib.suppress(psutil.Error):
            psutil.Process(child.pid).nice(_NICE)
        while child.poll() is None:
            if over.wait(_LOOK_S) or _asked(scheduler, seen):
                _end(child)
                return _STOPPED, ""
        told.seek(0)
        return child.returncode, told.read().decode("utf-8", "replace").strip().rpartition("\n")[2]


def _end(child: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        child.terminate()
    else:
        child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)
        return
    child.kill()
