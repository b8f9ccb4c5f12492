"""Rotation of rows before they are quantised, as llama.cpp has it for its quantised caches (pull request 21038).

Every `block` numbers of a row are multiplied by a normalised Hadamard matrix in Sylvester's order. It is symmetric and
its own inverse, so products of rotated rows are those of the rows; a channel that stands out is spread over its block.
"""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def hadamard(n: int) -> np.ndarray:
    """H [n, n] float32, n a power of two: H_1 = 1, H_2m = [[H_m, H_m], [H_m, -H_m]] / sqrt(2)."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(n)).astype(np.float32)


def rotated(rows: np.ndarray, block: int) -> np.ndarray:
    """Rows [..., d] in float32, every `block` numbers of them times H. block: 0 leaves them as they are."""
    if block == 0:
        return rows
    parts = rows.astype(np.float32).reshape(*rows.shape[:-1], rows.shape[-1] // block, block)
    return (parts @ hadamard(block)).reshape(rows.shape)
