"""A Crew says how many threads a turn is computed with: all, or so many that one processor is left to other work."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection

import psutil

_ALONE = 16  # turns in a row, until a conversation counts as the only one
_QUICK_S = 0.003  # seconds of a turn
_TRY, _TRY_S = 8, 0.05  # a try ends after so many turns, or seconds
_FIRST = 2  # turns until the first try
_LOOK = 16  # turns between two looks at what turns of the present way take
_BUSY, _FREE = 0.5, 0.25  # processors that other programs use: at least, and at most
_SHORT_S = 0.02  # turns below this are tried on a free machine, too: other threads of this program are not counted
_WINDOW_S = 0.1  # between two looks at what other programs use
_REST = (16, 50)  # times as long as a try took, until the next: twice as many each time, up to the second


class Crew:
    """Leaves a processor to others where that makes answers come sooner.

    Threads that compute wait for each other hundreds of times in a token. Where one of them has lost its processor, to
    another program or to a thread of the server's own, all of them wait for it. So a few turns are computed in the
    other way now and then: where other programs use a processor, and where a turn is short.
    """

    def __init__(self, threads: int, processors: int, others: Callable[[], float | None] | None = None) -> None:
        """others: the processors that other programs use; None where that is not known yet."""
        self._lock = threading.Lock()  # sessions in several threads may share a crew
        fewer = max(min(threads, processors - 1), 1)
        self._kinds = (_Choice(threads, fewer, 0.0), _Choice(threads, fewer, _QUICK_S))
        self._alone, self._kind = _ALONE, self._kinds[0]
        self._others, self._is_busy = others or Others(), None

    def threads(self, conversations: int = 1) -> int:
        """Chooses for the next turn, in which so many conversations go on."""
        with self._lock:
            self._look()
            self._alone = 0 if conversations > 1 else self._alone + 1
            self._kind = self._kinds[self._alone < _ALONE]
            return self._kind.threads

    def took(self, seconds: float) -> None:
        """Notes how long that turn took, in which answers went on and nothing was read."""
        with self._lock:
            self._kind.took(seconds)

    def _look(self) -> None:
        used = self._others()
        if used is None or _FREE <= used < _BUSY or (used >= _BUSY) == self._is_busy:
            return
        self._is_busy = used >= _BUSY
        for kind in self._kinds:
            kind.begin(self._is_busy)


class Others:
    """Measures how many processors other programs use."""

    def __init__(self) -> None:
        self._last = self._read()

    def __call__(self) -> float | None:
        """Returns what they used since the last look; None shortly after it, or if the system does not say."""
        if self._last is None or time.perf_counter() - self._last[0] < _WINDOW_S:
            return None
        last, self._last = self._last, self._read()
        if self._last is None:
            return None
        return (self._last[1] - last[1]) / (self._last[0] - last[0])

    def _read(self) -> tuple[float, float] | None:
        """Returns the time, and the seconds of all processors that other programs have used until then."""
        try:
            times = psutil.cpu_times()
        except (OSError, RuntimeError, psutil.Error):
            return None
        used = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.perf_counter(), used - time.process_time()


class _Choice:
    """Between all threads and fewer of them, by how long turns take."""

    def __init__(self, threads: int, fewer: int, quick: float) -> None:
        """quick: fewer are right where their turns take less than this."""
        self._ways, self._quick = (threads, fewer), quick
        self._turns = (deque[float](maxlen=2 * _TRY), deque[float](maxlen=2 * _TRY))
        self.begin(None)

    @property
    def threads(self) -> int:
        return self._ways[self._now]

    def begin(self, is_busy: bool | None) -> None:
        """Forgets what turns took, since another program has come or gone. None: that is not known."""
        for turns in self._turns:
            turns.clear()
        self._is_busy, self._now, self._left = is_busy, int(is_busy is True), 0
        self._tried, self._rest, self._times, self._count = 0.0, 0.0, _REST[0], 0

    def took(self, seconds: float) -> None:
        self._turns[self._now].append(seconds)
        if self._left:
            self._left, self._tried = self._left - 1, self._tried + seconds
            if not self._left or self._tried > _TRY_S or self._tried > 3 * _TRY * _mean(self._turns[1 - self._now]):
                self._now, self._left, self._rest = self._better(), 0, self._times * self._tried
                self._times = min(2 * self._times, _REST[1])
            return
        self._rest, self._count = self._rest - seconds, self._count + 1
        if self._count % _LOOK == 0 and self._turns[1 - self._now]:
            self._now = self._better()  # a try may have been lucky, and a program may have come
        if self._is_busy is False and _mean(self._turns[self._now]) > _SHORT_S:
            return
        if self._rest <= 0 and self._count >= _FIRST and self._ways[0] != self._ways[1]:
            self._now, self._left, self._tried = 1 - self._now, _TRY, 0.0
            self._turns[self._now].clear()

    def _better(self) -> int:
        of_all, of_fewer = map(_mean, self._turns)
        # few turns tell little: they decide against what the system says only where they differ by a tenth
        return int(of_fewer < self._quick or of_fewer < (1.1 if self._is_busy else 0.9) * of_all)


def _mean(turns: Collection[float]) -> float:
    return sum(turns) / len(turns) if turns else float("inf")
