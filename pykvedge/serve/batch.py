"""Tokens of several conversations that llama.cpp decodes at once."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class TokenBatch:
    """Holds up to `size` tokens, each of one sequence."""

    def __init__(self, llama: Any, size: int) -> None:
        self._tokens, self._positions, self._sequences = (np.zeros(size, np.int32) for _ in range(3))
        self._ones, self._wanted = np.ones(size, np.int32), np.zeros(size, np.int8)
        self._size, self.n = size, 0
        number = llama.llama_seq_id
        base = self._sequences.ctypes.data
        step = self._sequences.itemsize
        places = [ctypes.cast(base + i * step, ctypes.POINTER(number)) for i in range(size)]
        self._places = (ctypes.POINTER(number) * size)(*places)
        batch = self._batch = llama.llama_batch()
        batch.token = self._tokens.ctypes.data_as(ctypes.POINTER(llama.llama_token))
        batch.pos = self._positions.ctypes.data_as(ctypes.POINTER(llama.llama_pos))
        batch.n_seq_id = self._ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.seq_id = ctypes.cast(self._places, ctypes.POINTER(ctypes.POINTER(number)))
        batch.logits = self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    @property
    def room(self) -> int:
        """So many tokens still fit."""
        return self._size - self.n

    def clear(self) -> None:
        """Takes all tokens out."""
        self.n = 0

    def add(self, tokens: list[int], position: int, sequence: int, want_logits: bool) -> int:
        """Appends tokens from a position of a sequence on; want_logits: of the last one, whose place is returned."""
        if len(tokens) == 1:  # an answer goes on; slices would cost more than a small model's share of the turn
            at, self.n = self.n, self.n + 1
            self._tokens[at], self._positions[at], self._sequences[at] = tokens[0], position, sequence
            self._wanted[at] = want_logits
            return at
        at = slice(self.n, self.n + len(tokens))
        self._tokens[at] = tokens
        self._positions[at] = np.arange(position, position + len(tokens))
        self._sequences[at] = sequence
        self._wanted[at] = 0
        self.n = at.stop
        self._wanted[self.n - 1] = want_logits
        return self.n - 1

    def as_llama(self) -> Any:
        """Returns the llama_batch, which shares the arrays."""
        self._batch.n_tokens = self.n
        return self._batch
