"""What a cache holds of keys and values right after a prompt was compressed: rounded by type, and KIVI's residual."""

from __future__ import annotations

import numpy as np

from pykvedge.plans.kvtypes import GROUP, PLAIN, RESIDUAL, kivi, q4_0, q8_0
from pykvedge.plans.kvtypes.plain import round_to

_BITS = {"kivi4": 4, "kivi2": 2}
_BLOCKS = {"q8_0": q8_0, "q4_0": q4_0}


def keys(rows: np.ndarray, name: str) -> np.ndarray:
    """Keys [n, d] of one head as the type holds them, float32. KIVI: the last n % 32 of them stay f16."""
    if name in _BITS:
        full = len(rows) - len(rows) % GROUP
        return np.concatenate([kivi.rounded_keys(rows[:full], _BITS[name]), round_to(rows[full:], "f16")])
    return _alike(rows, name)


def values(rows: np.ndarray, name: str) -> np.ndarray:
    """Values [n, d] of one head as the type holds them, float32. KIVI: the last 32 of them stay f16."""
    if name in _BITS:
        old = max(0, len(rows) - RESIDUAL)
        return np.concatenate([kivi.rounded_values(rows[:old], _BITS[name]), round_to(rows[old:], "f16")])
    return _alike(rows, name)


def _alike(rows: np.ndarray, name: str) -> np.ndarray:
    if name in PLAIN:
        return round_to(rows, name)
    return _BLOCKS[name].dequantise(*_BLOCKS[name].quantise(rows))
