"""A person who waits sees a bar on stderr at a terminal; in a file, of a long run, a line at times."""

from __future__ import annotations

import sys
import time
from typing import Any

FILE_S = 15.0  # between two lines where stderr is no terminal


class Display:
    """A progress bar that is gone when the work is over. Call it as Session's `progress`, or step by step."""

    def __init__(self, enabled: bool, steps: int = 0) -> None:
        """enabled: false shows nothing but what `say` is given. steps: of a long run, all about as long."""
        self._enabled, self._terminal = enabled, sys.stderr.isatty()
        self._total, self._done = max(steps, 1), 0
        self._started = self._told = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, what: str, share: float) -> None:
        unknown = what.startswith("encoding") or share >= 1.0
        self._show(what, share, None if unknown else 1.0)

    def step(self, what: str, n: int = 1) -> None:
        """Counts n more steps as done; `what` comes next."""
        self._done += n
        now = time.monotonic()
        left = (now - self._started) / max(self._done, 1) * (self._total - self._done)
        rest = f", {clock(left)} left" if self._done else ""
        line = f"{self._done} of {self._total}{rest}: {what}"
        self._show(line, self._done, self._total)
        if self._enabled and not self._terminal and now - self._told >= FILE_S:
            self._told = now
            print(line, file=sys.stderr, flush=True)

    def skip(self, n: int) -> None:
        """Leaves out n steps that need not be done after all; negative: so many more must."""
        self._total = max(self._total - n, 1)

    def say(self, text: str) -> None:
        """Writes a line that stays."""
        self.done()
        print(text, file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, what: str, completed: float, total: float | None) -> None:
        if not self._enabled or not self._terminal:
            return
        if self._bar is None:
            self._start(what)
        self._bar.update(self._task, description=what, completed=completed, total=total)

    def _start(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(what, total=None)
        self._bar.start()


class Fetching(Display):
    """The progress of downloads; where stderr is no terminal, a line as each file begins, and at times."""

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)
        self._file = ""

    def __call__(self, what: str, share: float) -> None:
        file, colon, _ = what.partition(": ")
        now = time.monotonic()
        if self._terminal or not self._enabled or not (colon and file.startswith("fetching ")):
            self._show(what, share, 1.0)
        elif file != self._file or now - self._told >= FILE_S:
            self._file, self._told = file, now
            print(what, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Writes a time as 12 s, 3:05 min, or 1:02 h."""
    s = max(round(seconds), 0)
    if s < 60:
        return f"{s} s"
    minutes, s = divmod(s, 60)
    return f"{minutes}:{s:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
