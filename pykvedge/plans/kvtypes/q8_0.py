"""q8_0: blocks of 32 values of a row, a scale in half precision and codes from -127 to 127; x = scale * code."""

from __future__ import annotations

import numpy as np

from pykvedge.plans.kvtypes import GROUP


def quantise(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows [n, d] -> scales [n, d / 32] float16, codes [n, d / 32, 32] int8. Half a step goes away from zero."""
    blocks = rows.astype(np.float32).reshape(len(rows), rows.shape[1] // GROUP, GROUP)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    x = blocks * inverse
    size = np.abs(x)
    codes = np.sign(x) * (np.floor(size) + (size - np.floor(size) >= 0.5))
    return scale[..., 0].astype(np.float16), codes.astype(np.int8)


def dequantise(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The rows that these stand for, [n, d] float32."""
    return (scales.astype(np.float32)[..., None] * codes.astype(np.float32)).reshape(
        len(scales), scales.shape[1] * GROUP
    )
