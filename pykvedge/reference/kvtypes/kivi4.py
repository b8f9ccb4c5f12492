"""KIVI (Liu et al. 2024, arXiv 2402.02750, sec. 3.2): q = round((x - min) / scale), scale = (max - min) / (2^bits - 1).

Scale and minimum are stored in half precision. Ties go to even. A group of equal values has codes 0. Keys share scale
and minimum per channel over 32 tokens; values share them per token over 32 channels.
"""

from __future__ import annotations

import functools

import numpy as np

from pykvedge.reference.kvtypes import Definition


def rounded(groups: np.ndarray, levels: int) -> np.ndarray:
    """Returns the values that codes from 0 to `levels` stand for."""
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    scale, minimum = (x.astype(np.float16).astype(np.float32) for x in ((high - low) / np.float32(levels), low))
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint(((groups - minimum) / scale).clip(0, levels))
    return scale * np.where(scale == 0, np.float32(0), codes) + minimum


def in_bits(bits: int) -> Definition:
    """Returns KIVI's definition with codes of `bits` bits."""
    levels = 2**bits - 1
    return Definition(functools.partial(rounded, levels=levels), levels, minimum=True, residual=True)


TYPE = in_bits(4)
