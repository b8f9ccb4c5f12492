"""Positions of a sequence stay within the length that its model was trained for: they are made smaller in time."""

from __future__ import annotations

from pykvedge.errors import UnsupportedError
from pykvedge.library.libkvedge import Cache
from pykvedge.runtime.sequence import Sequence


class Positions:
    """Makes the positions of a sequence smaller, and turns its keys, before they pass `trained`; 0: not known.

    bound: KV pairs that a head keeps for good, 0: that is not known. turned: so many times. why_not: why the model's
    keys cannot turn, or empty; positions go on counting then.
    """

    def __init__(self, sequence: Sequence, cache: Cache, trained: int, bound: int = 0) -> None:
        self._sequence, self.trained = sequence, trained
        self._most = max(trained // 2, min(bound, trained * 3 // 4))
        self.turned, self.why_not = 0, ""
        try:
            cache.renumber(0, 1, sequence.number)  # nothing was read: whether the model can
        except UnsupportedError as error:
            self.why_not = str(error)

    def needed(self, n_tokens: int) -> bool:
        """Tells whether so many tokens more would pass the trained length."""
        return 0 < self.trained < self._sequence.n_past + n_tokens

    def make_room(self, n_tokens: int) -> None:
        """Turns, if need be, for so many tokens more; the logits of the last token are gone then.

        A prompt that is longer than the model was trained for passes that length nevertheless. Raises StateError.
        """
        most = max(min(self._most, self.trained - n_tokens), self.trained // 8, 1)
        if not self.why_not and self.needed(n_tokens) and self._sequence.n_past > most:
            self._sequence.renumber(most)
            self.turned += 1
