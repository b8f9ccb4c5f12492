"""A prompt read a second time in one of a server's sequences, while the other conversations go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pykvedge.library.libkvedge import Cache
from pykvedge.models.vision import Piece
from pykvedge.runtime.replay import Part


class Place(Protocol):
    """What the pass knows of a slot: its sequence, what is to be read into it, and where that goes."""

    sequence: int
    steps: deque[Piece]
    n_past: int
    n_cells: int


class SecondPass:
    """The pass of one slot, from where its prompt was read to where it is compressed.

    Its chunks become steps of the slot, and are read in the same parts as a prompt. logits: [n_vocab] float32, of the
    prompt's last token, by which the answer begins.
    """

    def __init__(self, parts: Sequence[Part], logits: np.ndarray, slot: Place, began: float) -> None:
        self.logits, self.began = logits, began
        self._left, self._open = deque(parts), False
        self._at = slot.n_past, slot.n_cells
        self._n_tokens = sum(part.chunk.n_tokens for part in parts)

    def go_on(self, cache: Cache, slot: Place) -> bool:
        """Takes back the chunk that was read and begins the next one; False: there is none."""
        self.leave(cache, slot)
        if not self._left:
            return False
        part = self._left.popleft()
        cache.begin_replay(part.chunk, slot.sequence)
        self._open = True
        slot.steps.extend(part.pieces)
        return True

    def leave(self, cache: Cache, slot: Place) -> None:
        """Takes back the chunk that is being read, if there is one: the sequence holds the prompt again."""
        if self._open:
            self._open = False
            slot.steps.clear()
            slot.n_past, slot.n_cells = self._at
            cache.end_replay(slot.sequence)

    def share(self, steps: Sequence[Piece]) -> float:
        """How much of the pass was read. steps: of the chunk, not read yet."""
        left = sum(part.chunk.n_tokens for part in self._left) + sum(piece.n_tokens for piece in steps)
        return 1 - left / max(self._n_tokens, 1)
