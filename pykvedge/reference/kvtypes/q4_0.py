"""q4_0: llama.cpp's blocks of a scale in half precision and codes from 0 to 15; x = scale * (code - 8).

The value of the largest magnitude becomes -8 * scale, so the scale has the opposite sign.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.kvtypes import Definition


def rounded(groups: np.ndarray) -> np.ndarray:
    """Returns the stored values. Product and sum are each rounded to float32."""
    place = np.abs(groups).argmax(axis=-1, keepdims=True)
    scale = np.take_along_axis(groups, place, axis=-1) / np.float32(-8)
    with np.errstate(divide="ignore"):
        x = groups * np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    codes = np.floor(x + np.float32(8.5)).clip(0, 15)
    return scale.astype(np.float16).astype(np.float32) * (codes - 8)


TYPE = Definition(rounded, levels=8, ggml=2)
