"""A History knows how the tokens in an attached model's cache came there, and what a new request may go on from.

A compressed cache cannot be cut: its rows were chosen, and maybe merged, in the light of the whole prompt. A request
that only adds to what is there goes on from it, as the next message of a conversation does. Any other one goes back to
the last request that began with tokens which both share, and everything up to there is read again as it was the first
time. A request that is repeated is therefore answered alike.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Read:
    """Tokens that were read at once, and whether they are part of an answer."""

    tokens: list[int]
    generated: bool


class History:
    """The history of one sequence begins with an empty cache."""

    def __init__(self) -> None:
        self.clear(uncut=False)

    def clear(self, uncut: bool) -> None:
        """Begins anew, as the cache is empty. uncut: nothing that comes will be compressed."""
        self.uncut = uncut
        self._reads: list[Read] | None = []  # None: something came that was not noted
        self._n = 0  # tokens of them
        self.failed = False  # to read some of it
        self._requests: list[tuple[int, int]] = []  # tokens and reads that were there when each began

    def copy(self) -> History:
        """Returns one that goes its own way."""
        other = copy.copy(self)
        other._reads, other._requests = self._reads and list(self._reads), list(self._requests)
        return other

    def knows(self, n_tokens: int) -> bool:
        """Tells whether the n_tokens of the cache are those that were noted."""
        return self._reads is not None and self._n == n_tokens

    def note(self, n_before: int, tokens: Sequence[int], generated: bool) -> None:
        """Notes that tokens were read into a cache of n_before, to which an uncompressed one may have been cut."""
        if self.uncut and n_before < self._n:
            self.cut(n_before)
        if self._reads is None or self._n != n_before:
            self.lose()
            return
        self._reads.append(Read(list(tokens), generated))
        self._n += len(tokens)

    def prompt_tokens(self, n_tokens: int) -> int:
        """Counts the tokens before the last answer, of n_tokens in the cache; 0: nobody knows."""
        if self._reads is None or self._n != n_tokens:
            return 0
        n = n_tokens
        for read in reversed(self._reads):
            if not read.generated:
                break
            n -= len(read.tokens)
        return n

    def cut(self, n_tokens: int) -> None:
        """Notes that the first n_tokens are left in the cache."""
        left, self._n = n_tokens, n_tokens
        self._requests = [request for request in self._requests if request[0] <= n_tokens]
        for i, read in enumerate(self._reads or []):
            if left <= len(read.tokens):
                self._reads[i:] = [Read(read.tokens[:left], read.generated)] if left else []  # type: ignore[index]
                return
            left -= len(read.tokens)

    def lose(self) -> None:
        """Notes that nobody knows how the cache came to what it holds."""
        self._reads, self._requests = None, []

    def fail(self) -> None:
        """Notes that tokens were refused half-way: nothing can go on from here."""
        self.lose()
        self.failed = True

    def begin(self) -> None:
        """Notes that a request goes on from here."""
        if self._reads is not None:
            self._requests.append((self._n, len(self._reads)))

    def before(self, n_shared: int) -> tuple[list[Read], list[tuple[int, int]]]:
        """Returns what to read again for a request that shares n_shared tokens, and the requests in it."""
        if self._reads is None:
            return [], []
        earlier = [request for request in self._requests if request[0] <= n_shared]
        return (self._reads[: earlier[-1][1]], earlier[:-1]) if earlier else ([], [])

    def all(self) -> tuple[list[Read], list[tuple[int, int]]]:
        """Returns what to read again to come here, and the requests in it."""
        return list(self._reads or []), list(self._requests)

    def again(self, requests: list[tuple[int, int]]) -> None:
        """Notes that what `before` or `all` returned was read again."""
        if self._reads is not None:
            self._requests = requests


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Counts the tokens that both begin with."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
