"""q8_0: llama.cpp's blocks of a scale in half precision and codes from -127 to 127; x = scale * code."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.kvtypes import Definition


def rounded(groups: np.ndarray) -> np.ndarray:
    """Returns the stored values. Half a step is rounded away from zero."""
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        x = groups * np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    size = np.abs(x)
    codes = np.sign(x) * (np.floor(size) + (size - np.floor(size) >= 0.5))
    return scale.astype(np.float16).astype(np.float32) * codes


TYPE = Definition(rounded, levels=127, ggml=8)
