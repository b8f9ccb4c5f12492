"""Keys and values as a cache holds them right after compression: rounded by type, with KIVI's residual."""

from __future__ import annotations

import functools

import numpy as np

from pykvedge.reference.kvtypes import GROUP, PLAIN, RESIDUAL, definition


def round_to(x: np.ndarray, kv_type: str) -> np.ndarray:
    """Returns x rounded to the storage type f16, bf16 or f32, ties to even: float32 in the shape of x."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    if kv_type == "f32":
        return x
    if kv_type == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@functools.cache
def hadamard(n: int) -> np.ndarray:
    """Returns H [n, n] float32 in Sylvester's order, n = 2^k: H_1 = 1, H_2m = [[H_m, H_m], [H_m, -H_m]] / sqrt(2).

    H is symmetric and orthogonal, so products of rotated rows equal products of the rows.
    """
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(n)).astype(np.float32)


def rotated(rows: np.ndarray, block: int) -> np.ndarray:
    """Multiplies every `block` numbers of rows [..., d] by H, in float32. block = 0 returns the rows unchanged.

    llama.cpp rotates rows before quantisation (pull request 21038) to spread an outlier channel over its block.
    """
    if block == 0:
        return rows
    parts = rows.astype(np.float32).reshape(*rows.shape[:-1], rows.shape[-1] // block, block)
    return (parts @ hadamard(block)).reshape(rows.shape)


def stored_keys(rows: np.ndarray, name: str, block: int = 0) -> np.ndarray:
    """Returns the keys [n, d] of one head as the type holds them, float32. KIVI: the last n % 32 keys stay f16.

    block: numbers rotated together before rounding and rotated back after reading; 0: no rotation.
    """
    if name in PLAIN or not definition(name).residual:
        return _stored_rows(rows, name, block)
    full = len(rows) - len(rows) % GROUP
    channels = rows[:full].astype(np.float32).reshape(full // GROUP, GROUP, rows.shape[1]).swapaxes(1, 2)
    stored = definition(name).rounded(channels).swapaxes(1, 2).reshape(full, rows.shape[1])
    return np.concatenate([stored, round_to(rows[full:], "f16")])


def stored_values(rows: np.ndarray, name: str, block: int = 0) -> np.ndarray:
    """Returns the values [n, d] of one head as the type holds them, float32. KIVI: the last 32 values stay f16.

    block: numbers rotated together, as in stored_keys().
    """
    old = max(0, len(rows) - RESIDUAL) if name not in PLAIN and definition(name).residual else len(rows)
    return np.concatenate([_stored_rows(rows[:old], name, block), round_to(rows[old:], "f16")])


def _stored_rows(rows: np.ndarray, name: str, block: int) -> np.ndarray:
    if name in PLAIN:
        return round_to(rows, name)
    groups = rotated(rows, block).astype(np.float32).reshape(len(rows), rows.shape[1] // GROUP, GROUP)
    return rotated(definition(name).rounded(groups).reshape(rows.shape), block)
