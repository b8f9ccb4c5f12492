"""Chooses the number of threads for each turn: all threads, or fewer to leave one processor to other programs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection

import psutil

_ALONE = 16  # after so many turns in a row with one conversation, the conversation counts as the only one
_QUICK_S = 0.003  # seconds: with several conversations, shorter turns use fewer threads
_TRY, _TRY_S = 8, 0.05  # a trial ends after so many turns, or so many seconds
_FIRST = 2  # turns before the first trial
_LOOK = 16  # turns between two comparisons of both thread counts
_BUSY, _FREE = 0.5, 0.25  # processors used by other programs: at least 0.5 is busy, below 0.25 is free
_SHORT_S = 0.02  # seconds: shorter turns are tried on a free machine too, for other threads of this program
_WINDOW_S = 0.1  # seconds between two measurements of other programs
_REST = (16, 50)  # pause after a trial, in trial times: starts at 16, doubles each time, ends at 50


class ThreadChooser:
    """Chooses between all threads and fewer threads, by the time that turns take.

    Compute threads wait for each other hundreds of times per token. If one thread loses its processor, to another
    program or to another thread of the server, all threads wait. So the chooser sometimes computes a few turns with the
    other number of threads: when other programs use a processor, and when turns are short.
    """

    def __init__(self, threads: int, processors: int, others: Callable[[], float | None] | None = None) -> None:
        """others: returns the processors that other programs use, or None if unknown. None: measures them."""
        self._lock = threading.Lock()  # sessions in several threads may share a chooser
        fewer = max(min(threads, processors - 1), 1)
        self._kinds = (_Choice(threads, fewer, 0.0), _Choice(threads, fewer, _QUICK_S))
        self._alone, self._kind = _ALONE, self._kinds[0]
        self._others, self._is_busy = others or OtherPrograms(), None

    def threads(self, conversations: int = 1) -> int:
        """Returns the number of threads for the next turn. conversations: number of conversations in that turn."""
        with self._lock:
            self._look()
            self._alone = 0 if conversations > 1 else self._alone + 1
            self._kind = self._kinds[self._alone < _ALONE]
            return self._kind.threads

    def took(self, seconds: float) -> None:
        """Records the seconds of the last turn. The turn must have decoded answers only, without prefill."""
        with self._lock:
            self._kind.took(seconds)

    def _look(self) -> None:
        used = self._others()
        if used is None or _FREE <= used < _BUSY or (used >= _BUSY) == self._is_busy:
            return
        self._is_busy = used >= _BUSY
        for kind in self._kinds:
            kind.begin(self._is_busy)


class OtherPrograms:
    """Measures how many processors other programs use."""

    def __init__(self) -> None:
        self._last = self._read()

    def __call__(self) -> float | None:
        """Returns the processors used since the last measurement. None: too early, or the system does not tell."""
        if self._last is None or time.perf_counter() - self._last[0] < _WINDOW_S:
            return None
        last, self._last = self._last, self._read()
        if self._last is None:
            return None
        return (self._last[1] - last[1]) / (self._last[0] - last[0])

    def _read(self) -> tuple[float, float] | None:
        """Returns the current time and the processor seconds of all other programs so far. None: unknown."""
        try:
            times = psutil.cpu_times()
        except (OSError, RuntimeError, psutil.Error):
            return None
        used = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return time.perf_counter(), used - time.process_time()


class _Choice:
    """Chooses between two thread counts by the measured seconds of turns."""

    def __init__(self, threads: int, fewer: int, quick: float) -> None:
        """quick: seconds; fewer threads are always right if their turns are shorter."""
        self._ways, self._quick = (threads, fewer), quick
        self._turns = (deque[float](maxlen=2 * _TRY), deque[float](maxlen=2 * _TRY))
        self.begin(None)

    @property
    def threads(self) -> int:
        return self._ways[self._now]

    def begin(self, is_busy: bool | None) -> None:
        """Forgets all measurements, because another program started or ended. is_busy: None if unknown."""
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
            self._now = self._better()  # the trial may have been lucky, or another program may have started
        if self._is_busy is False and _mean(self._turns[self._now]) > _SHORT_S:
            return
        if self._rest <= 0 and self._count >= _FIRST and self._ways[0] != self._ways[1]:
            self._now, self._left, self._tried = 1 - self._now, _TRY, 0.0
            self._turns[self._now].clear()

    def _better(self) -> int:
        of_all, of_fewer = map(_mean, self._turns)
        # a few turns are weak evidence: they overrule the system's load figure only if they differ by a tenth
        return int(of_fewer < self._quick or of_fewer < (1.1 if self._is_busy else 0.9) * of_all)


def _mean(turns: Collection[float]) -> float:
    return sum(turns) / len(turns) if turns else float("inf")
