"""A model is tuned while its server has nothing to do: by `kvedge tune`, as a program of its own.

The program ends when a request comes. Its figures stay in a file, so that it goes on from there the next time.
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

_IDLE_S = 30.0  # without a request, before it starts
_LOOK_S = 0.1  # between two looks at the server
_END_S = 10.0  # in which it ends by itself
_STOPPED = 130  # its exit code then
_NICE = psutil.IDLE_PRIORITY_CLASS if sys.platform == "win32" else 19


@contextlib.contextmanager
def tuning(scheduler: Scheduler, arguments: Sequence[str], say: Callable[[str], None]) -> Iterator[None]:
    """Tunes in idle time while the block runs. arguments: of `kvedge tune`; none: it tunes nothing. say: for people."""
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
    say(f"the model is tuned after {_IDLE_S:g} s without a request, until one comes")
    while code == _STOPPED and _idle(scheduler, over):
        try:
            code, told = _tune(scheduler, arguments, over)
        except OSError as error:
            code, told = 1, f"tuning cannot start: {error.strerror or error}"
    if code == 0:
        say("tuning is done; the server takes the plan when it starts the next time (kvedge tune --show)")
    elif code != _STOPPED:
        say(told.removeprefix("kvedge: ") or f"tuning ended with exit code {code}")


def _idle(scheduler: Scheduler, over: threading.Event) -> bool:
    """Waits until no request was there for a while. Returns False when the server ends."""
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
    """Tells whether there is a request, or was one since so many had ended."""
    return bool(scheduler.busy or scheduler.waiting or _ended(scheduler) != seen)


def _tune(scheduler: Scheduler, arguments: Sequence[str], over: threading.Event) -> tuple[int, str]:
    """Runs until a request comes, or to the end. Returns the exit code and the last line on stderr. Raises OSError."""
    command = [sys.executable, "-m", "pykvedge", "tune", "--quiet", "--parent-pid", str(os.getpid()), *arguments]
    seen, nothing = _ended(scheduler), subprocess.DEVNULL
    with (
        tempfile.TemporaryFile() as told,
        # in a session of its own: Ctrl-C at the terminal is the server's
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
