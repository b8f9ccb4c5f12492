"""Progress bars on stderr, for a person who waits at a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from pykvedge.errors import one_line

if TYPE_CHECKING:
    from typing_extensions import Self

FILE_S = 15.0  # seconds between two lines if stderr is no terminal


class Display:
    """A progress bar that is removed after the work or the with block. A callable for Session's `progress`."""

    def __init__(self, enabled: bool) -> None:
        """enabled: false shows only the lines of `say`."""
        self._enabled, self._terminal = enabled, sys.stderr.isatty()
        self._told = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, what: str, share: float) -> None:
        unknown = what.startswith("encoding") or share >= 1.0
        self._show(what, share, None if unknown else 1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def say(self, text: str) -> None:
        """Writes a line that stays on the screen."""
        self.done()
        print(one_line(text), file=sys.stderr, flush=True)

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
    """The progress of downloads. If stderr is no terminal, it writes a line per file, and repeats it at intervals."""

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)
        self._file = ""

    def __call__(self, what: str, share: float) -> None:
        file, colon, _ = what.partition(": ")
        now = time.monotonic()
        if self._terminal or not self._enabled or not (colon and file.startswith("downloading ")):
            self._show(what, share, 1.0)
        elif file != self._file or now - self._told >= FILE_S:
            self._file, self._told = file, now
            print(what, file=sys.stderr, flush=True)
