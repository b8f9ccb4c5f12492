"""q4_0: blocks of 32 values of a row, a scale in half precision and codes from 0 to 15; x = scale * (code - 8).

The value of largest size becomes -8, whichever its sign: the scale has the opposite one.
"""

from __future__ import annotations

import numpy as np

from pykvedge.plans.kvtypes import GROUP


def quantise(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows [n, d] -> scales [n, d / 32] float16, codes [n, d / 32, 32] uint8."""
    blocks = rows.astype(np.float32).reshape(len(rows), rows.shape[1] // GROUP, GROUP)
    place = np.abs(blocks).argmax(axis=2, keepdims=True)
    scale = np.take_along_axis(blocks, place, axis=2) / np.float32(-8)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    codes = np.floor(blocks * inverse + np.float32(8.5)).clip(0, 15)  # product and sum each rounded to float32
    return scale[..., 0].astype(np.float16), codes.astype(np.uint8)


def dequantise(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The rows that these stand for, [n, d] float32."""
    return (scales.astype(np.float32)[..., None] * (codes.astype(np.float32) - 8)).reshape(
        len(scales), scales.shape[1] * GROUP
    )
