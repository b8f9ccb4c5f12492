"""KIVI (Liu et al. 2024, sec. 3.2): q = round((x - min) / scale) with scale = (max - min) / (2^bits - 1).

Scale and minimum are kept in half precision; ties go to even; a group whose values are all equal has codes 0.
"""

from __future__ import annotations

import numpy as np

from pykvedge.plans.kvtypes import GROUP


def quantise(groups: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """groups [..., g], values that share a scale -> scales and minima [...] float16, codes [..., g] uint8."""
    groups = groups.astype(np.float32)
    largest = np.float32(2**bits - 1)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    scales, minima = ((high - low) / largest).astype(np.float16), low.astype(np.float16)
    step = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint(((groups - minima.astype(np.float32)[..., None]) / step).clip(0, largest))
    return scales, minima, np.where(step == 0, 0, codes).astype(np.uint8)


def dequantise(scales: np.ndarray, minima: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The values that these stand for, [..., g] float32."""
    return scales.astype(np.float32)[..., None] * codes + minima.astype(np.float32)[..., None]


def rounded_keys(rows: np.ndarray, bits: int) -> np.ndarray:
    """rows [n, d] with n a multiple of 32, a scale for each channel of every 32 tokens; [n, d] float32."""
    groups = rows.reshape(len(rows) // GROUP, GROUP, rows.shape[1]).swapaxes(1, 2)
    return dequantise(*quantise(groups, bits)).swapaxes(1, 2).reshape(rows.shape)


def rounded_values(rows: np.ndarray, bits: int) -> np.ndarray:
    """rows [n, d], a scale for every 32 channels of a token; [n, d] float32."""
    return dequantise(*quantise(rows.reshape(len(rows), rows.shape[1] // GROUP, GROUP), bits)).reshape(rows.shape)
