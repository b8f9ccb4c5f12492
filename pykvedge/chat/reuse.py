"""Records how an attached model read the tokens in its cache, to decide what a new request can continue from.

A compressed cache cannot be cut: its rows were chosen, and maybe merged, with respect to the whole prompt. A request
that only adds tokens continues from the cache. Any other request returns to the last earlier request whose start is
within the shared tokens, and reads everything up to there again in the same steps. So a repeated request has the same
answer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReadCall:
    """Tokens read in one call. generated: the tokens belong to an answer."""

    tokens: list[int]
    generated: bool


class History:
    """The history of one sequence, from an empty cache on."""

    def __init__(self) -> None:
        self.clear(uncut=False)

    def clear(self, uncut: bool) -> None:
        """Starts again with an empty cache. uncut: nothing will be compressed."""
        self.uncut = uncut
        self._reads: list[ReadCall] | None = []  # None: unrecorded tokens came between
        self._n = 0  # number of recorded tokens
        self.failed = False  # whether the last read failed
        self._requests: list[tuple[int, int]] = []  # tokens and reads before each request

    def copy(self) -> History:
        """Returns an independent copy."""
        other = copy.copy(self)
        other._reads, other._requests = self._reads and list(self._reads), list(self._requests)
        return other

    def knows(self, n_tokens: int) -> bool:
        """Returns whether the recorded tokens are the n_tokens of the cache."""
        return self._reads is not None and self._n == n_tokens

    def note(self, n_before: int, tokens: Sequence[int], generated: bool) -> None:
        """Records tokens read into a cache of n_before tokens. An uncompressed cache may have been cut to n_before."""
        if self.uncut and n_before < self._n:
            self.cut(n_before)
        if self._reads is None or self._n != n_before:
            self.lose()
            return
        self._reads.append(ReadCall(list(tokens), generated))
        self._n += len(tokens)

    def prompt_tokens(self, n_tokens: int) -> int:
        """Returns the number of tokens before the last answer. n_tokens: in the cache. 0: unknown."""
        if self._reads is None or self._n != n_tokens:
            return 0
        n = n_tokens
        for read in reversed(self._reads):
            if not read.generated:
                break
            n -= len(read.tokens)
        return n

    def cut(self, n_tokens: int) -> None:
        """Records that only the first n_tokens stay in the cache."""
        left, self._n = n_tokens, n_tokens
        self._requests = [request for request in self._requests if request[0] <= n_tokens]
        for i, read in enumerate(self._reads or []):
            if left <= len(read.tokens):
                self._reads[i:] = [ReadCall(read.tokens[:left], read.generated)] if left else []  # type: ignore[index]
                return
            left -= len(read.tokens)

    def lose(self) -> None:
        """Records that the origin of the cache's tokens is unknown."""
        self._reads, self._requests = None, []

    def fail(self) -> None:
        """Records that a read failed: no request can continue from the cache."""
        self.lose()
        self.failed = True

    def begin(self) -> None:
        """Records that a request begins here."""
        if self._reads is not None:
            self._requests.append((self._n, len(self._reads)))

    def before(self, n_shared: int) -> tuple[list[ReadCall], list[tuple[int, int]]]:
        """Returns the reads to repeat for a request with n_shared equal first tokens, and the requests among them."""
        if self._reads is None:
            return [], []
        earlier = [request for request in self._requests if request[0] <= n_shared]
        return (self._reads[: earlier[-1][1]], earlier[:-1]) if earlier else ([], [])

    def all(self) -> tuple[list[ReadCall], list[tuple[int, int]]]:
        """Returns the reads to repeat for the present state, and the requests among them."""
        return list(self._reads or []), list(self._requests)

    def again(self, requests: list[tuple[int, int]]) -> None:
        """Records that the reads of `before` or `all` were repeated."""
        if self._reads is not None:
            self._requests = requests


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of equal first tokens."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
