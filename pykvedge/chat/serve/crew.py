"""A Crew says how many threads a turn is computed with, as long as there is other work for the processors."""

from __future__ import annotations

_QUICK_S, _SLOW_S = 0.003, 0.008  # seconds of a token of every answer
_ALONE = 16  # turns
_SHARE = 1 / 16  # of the last turn in the mean


class Crew:
    """Leaves a processor to those who read requests and write answers, where turns are quick and conversations many.

    Threads that compute wait for each other hundreds of times in a token. Where all processors are theirs, and the
    server's other threads need one now and then, all of them wait for the one that lost its own: of a small model eight
    clients get a fifth fewer answers. A large one's turn takes so long that there is little else to do.
    """

    def __init__(self, threads: int, processors: int) -> None:
        self._threads, self._fewer = threads, max(min(threads, processors - 1), 1)
        self._turn_s = _SLOW_S
        self._sparing, self._alone = False, _ALONE

    def threads(self, conversations: int) -> int:
        """Chooses for the next turn, in which so many conversations go on."""
        self._alone = 0 if conversations > 1 else self._alone + 1
        if self._alone >= _ALONE or self._turn_s > _SLOW_S:
            self._sparing = False
        elif self._turn_s < _QUICK_S:
            self._sparing = True
        return self._fewer if self._sparing else self._threads

    def took(self, seconds: float) -> None:
        """Notes how long a turn took in which answers went on and nothing was read."""
        self._turn_s += _SHARE * (seconds - self._turn_s)
