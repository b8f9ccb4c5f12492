"""f16, bf16 and f32."""

from __future__ import annotations

import numpy as np


def round_to(x: np.ndarray, kv_type: str) -> np.ndarray:
    """x as the storage type f16, bf16 or f32 holds it, rounded to nearest even. float32 in shape of x."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    if kv_type == "f32":
        return x
    if kv_type == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)
