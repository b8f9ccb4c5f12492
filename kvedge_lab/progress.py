"""The progress of long runs: a bar at a terminal, a line at intervals in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from pykvedge.cli.progress import FILE_S, Display


class Steps(Display):
    """The progress of a run of many steps of about equal length."""

    def __init__(self, enabled: bool, steps: int = 0) -> None:
        super().__init__(enabled)
        self._total, self._done, self._started = max(steps, 1), 0, time.monotonic()

    def __call__(self, what: str, share: float) -> None:
        super().__call__(what, share)
        self._line(f"{what}, {100 * share:.0f} %")

    def step(self, what: str, n: int = 1) -> None:
        """Counts n more steps as done. what: the next step."""
        self._done += n
        now = time.monotonic()
        left = (now - self._started) / max(self._done, 1) * (self._total - self._done)
        rest = f", {clock(left)} left" if self._done else ""
        self._tell(f"{self._done} of {self._total}{rest}: {what}", self._done, self._total)

    def _tell(self, line: str, done: float, total: float) -> None:
        self._show(line, done, total)
        self._line(line)

    def _line(self, line: str) -> None:
        now = time.monotonic()
        if self._enabled and not self._terminal and now - self._told >= FILE_S:
            self._told = now
            print(line, file=sys.stderr, flush=True)

    def skip(self, n: int) -> None:
        """Removes n steps that are not needed; a negative n adds steps."""
        self._total = max(self._total - n, 1)


class Minutes(Steps):
    """The progress of a run with a time limit in seconds. spent(): returns the seconds used so far."""

    def __init__(self, enabled: bool, seconds: float, spent: Callable[[], float]) -> None:
        super().__init__(enabled)
        self._seconds, self._spent = seconds, spent

    def step(self, what: str, n: int = 1) -> None:
        spent = min(self._spent(), self._seconds)
        self._tell(f"{clock(spent)} of {clock(self._seconds)}: {what}", spent, self._seconds)


def clock(seconds: float) -> str:
    """Returns a time as 12 s, 3:05 min, or 1:02 h."""
    s = max(round(seconds), 0)
    if s < 60:
        return f"{s} s"
    minutes, s = divmod(s, 60)
    return f"{minutes}:{s:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
