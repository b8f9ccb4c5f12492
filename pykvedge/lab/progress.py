"""How far a long run is, and when it will be done: on stderr, in place at a terminal, else a line at times."""

from __future__ import annotations

import sys
import time


class Countdown:
    """Progress of `total` equal steps."""

    TERMINAL_S, FILE_S = 0.2, 15.0  # between two lines

    def __init__(self, total: int, enabled: bool = True) -> None:
        self._total, self._enabled = max(total, 1), enabled
        self._rewrites = sys.stderr.isatty()
        self._started = self._told = time.monotonic()
        self._done, self._width = 0, 0

    def step(self, what: str, n: int = 1) -> None:
        """n more steps are done, and `what` comes next."""
        self._done += n
        now = time.monotonic()
        if not self._enabled or now - self._told < (self.TERMINAL_S if self._rewrites else self.FILE_S):
            return
        self._told = now
        left = (now - self._started) / max(self._done, 1) * (self._total - self._done)
        known = self._done > 0
        rest = f", {clock(left)} left" if known else ""
        self._write(f"{self._done} of {self._total}{rest}: {what}")

    def skip(self, n: int) -> None:
        """n steps need not be done after all; negative: so many more must."""
        self._total = max(self._total - n, 1)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Removes the line of a terminal."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0

    def _write(self, line: str) -> None:
        if self._rewrites:
            line = line[:100]
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


def clock(seconds: float) -> str:
    """12 s, 3:05 min, 1:02 h."""
    s = max(round(seconds), 0)
    if s < 60:
        return f"{s} s"
    minutes, s = divmod(s, 60)
    return f"{minutes}:{s:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
