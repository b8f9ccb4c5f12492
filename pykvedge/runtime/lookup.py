"""Guesses the next tokens of a text from earlier parts of the text (prompt lookup, n-gram speculation)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GRAMS = (16, 8, 4, 2)  # lengths of the searched runs of tokens, the longest first
_PRIMES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # multipliers of the hash: after each token, and at the end
_LEAST = 1 << 12  # tokens in the first tables
_LONGEST_CHAIN = 32  # most runs compared per hash value
BREAK = -1  # stands for an image; no guess crosses a break


class Lookup:
    """Remembers the last places of runs of 2, 4, 8 and 16 tokens. A token costs a few hashes, however long the text."""

    def __init__(self) -> None:
        self._tokens, self._n = np.full(_LEAST, BREAK, np.int32), 0
        self._tables = [_Table(length, _LEAST) for length in _GRAMS]
        self._match = (-1, 0)  # place of the earlier text's last token, and number of equal tokens that end there

    def add(self, tokens: Sequence[int]) -> None:
        """Adds tokens of the text, or BREAK for an image."""
        if not len(tokens):
            return
        if len(tokens) == 1:
            self._match = self._follow(tokens[0])
        start, self._n = self._n, self._n + len(tokens)
        if self._n > len(self._tokens):
            room = 1 << (self._n - 1).bit_length()
            self._tokens = np.concatenate((self._tokens[:start], np.full(room - start, BREAK, np.int32)))
            self._tables = [_Table(length, room) for length in _GRAMS]
            self._enter(0, start)
        self._tokens[start : self._n] = tokens
        if len(tokens) > 1:
            self._enter(start, self._n - 1)  # not the last token: it is searched among earlier runs first
            self._match = self._search(int(self._tokens[self._n - 1]), self._n - 1)
            start = self._n - 1
        self._enter(start, self._n)

    def guess(self, token: int, most: int) -> tuple[list[int], int]:
        """Returns up to `most` guesses at the tokens behind `token`, which is the next token of the text.

        Also returns the number of equal tokens, up to 16, before the guess and before its source.
        """
        at, length = self._follow(token)
        if at < 0:
            return [], 0
        out: list[int] = []
        for i in range(most):
            place = at + 1 + i - self._n  # relative to the end; from 0 on the guess repeats itself
            one = int(self._tokens[self._n + place]) if place < 0 else token if place == 0 else out[place - 1]
            if one < 0:
                break
            out.append(one)
        return out, min(length, _GRAMS[0])

    def _follow(self, token: int) -> tuple[int, int]:
        """Returns the earlier place of the text extended by one token, and the number of equal tokens."""
        at, length = self._match
        if token < 0:
            return -1, 0
        alike = (at + 1, length + 1) if 0 <= at < self._n - 1 and self._tokens[at + 1] == token else (-1, 0)
        if alike[1] >= _GRAMS[0]:
            return alike
        found = self._search(token, self._n)
        return found if found[1] > alike[1] else alike

    def _search(self, token: int, n: int) -> tuple[int, int]:
        """Returns place and length of the longest known run that ends with `token` behind the first n tokens."""
        for table in self._tables:
            if n + 1 >= table.length and (at := table.find(self._tokens, n, token)) >= 0:
                return at, table.length
        return -1, 0

    def _enter(self, start: int, end: int) -> None:
        """Records the runs that end in [start, end)."""
        for table in self._tables:
            table.enter(self._tokens, max(start, table.length - 1), end)


class _Table:
    """Last places of runs of `length` tokens, chained: each place knows the previous place with the same hash value."""

    def __init__(self, length: int, room: int) -> None:
        """room: most tokens of the text, a power of two."""
        self.length = length
        self._last, self._before = np.full(room, -1, np.int32), np.full(room, -1, np.int32)

    def find(self, tokens: np.ndarray, n: int, token: int) -> int:
        """Searches the run that ends with `token` behind the first n tokens. Returns the run's last place, or -1."""
        run = [*tokens[n - self.length + 1 : n].tolist(), token]
        at = int(self._last[self._place(run)]) if min(run) >= 0 else -1
        for _ in range(_LONGEST_CHAIN):
            if at < 0 or tokens[at - self.length + 1 : at + 1].tolist() == run:
                return at
            at = int(self._before[at])
        return -1

    def _place(self, run: list[int]) -> int:
        out = 0
        for token in run:
            out = (out * _PRIMES[0] + token) & 0xFFFFFFFFFFFFFFFF
        return ((out * _PRIMES[1] & 0xFFFFFFFFFFFFFFFF) >> 32) & (len(self._last) - 1)

    def enter(self, tokens: np.ndarray, start: int, end: int) -> None:
        """Records the runs that end in [start, end)."""
        if end - start == 1:
            place = self._place(tokens[start - self.length + 1 : end].tolist())
            self._before[start], self._last[place] = self._last[place], start
        if end - start <= 1:
            return
        sums = np.zeros(end - start, np.uint64)
        for i in range(self.length):
            here = tokens[start - self.length + 1 + i : end - self.length + 1 + i]
            sums = sums * np.uint64(_PRIMES[0]) + here.astype(np.int64).astype(np.uint64)
        places = (sums * np.uint64(_PRIMES[1]) >> np.uint64(32) & np.uint64(len(self._last) - 1)).astype(np.int64)
        order = np.argsort(places, kind="stable")
        alike = places[order][1:] == places[order][:-1]
        before = self._last[places]
        before[order[1:][alike]] = start + order[:-1][alike]
        self._before[start:end] = before
        self._last[places] = np.arange(start, end, dtype=np.int32)  # the last run of equal hash values wins
