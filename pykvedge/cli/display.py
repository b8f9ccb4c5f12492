"""What a person sees on stderr while waiting."""

from __future__ import annotations

import sys
from typing import Any


class Display:
    """A progress bar on stderr, gone when the step is over. Call it as Session's `progress`."""

    def __init__(self, enabled: bool) -> None:
        """enabled: false shows nothing; nor is anything shown when stderr is no terminal."""
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, what: str, share: float) -> None:
        if not self._enabled:
            return
        if self._bar is None:
            self._start(what)
        unknown = what.startswith("encoding") or share >= 1.0
        self._bar.update(self._task, description=what, completed=share, total=None if unknown else 1.0)

    def _start(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(what, total=None)
        self._bar.start()

    def done(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
