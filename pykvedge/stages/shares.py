"""Turning real shares of a budget into whole numbers that add up to it."""

from __future__ import annotations

import numpy as np


def fill_up(shares: np.ndarray, total: float, most: float) -> np.ndarray:
    """Shares scaled to `total`; what would exceed `most` is shared out among the others in proportion.

    Where no other has a share to take it in proportion to, it is spread evenly. shares [n] float64 >= 0.
    """
    out, full = shares.astype(np.float64), np.zeros(len(shares), dtype=bool)
    while True:
        left = total - most * full.sum()
        room = out[~full]
        out[~full] = room * (left / room.sum()) if room.sum() > 0 else left / max(len(room), 1)
        over = ~full & (out > most)
        if not over.any():
            return out
        out[over], full = most, full | over


def round_shares(shares: np.ndarray, total: int, most: int) -> np.ndarray:
    """Whole numbers [n] int64 that add up to `total`, none above `most`: largest remainder, ties to the lower index.

    total <= most * n.
    """
    real = fill_up(shares, total, most)
    out = np.floor(real + 1e-9).astype(np.int64)
    order = np.argsort(-np.round((real - out) * 1e9), kind="stable")
    while (left := total - int(out.sum())) > 0:
        out[[i for i in order if out[i] < most][:left]] += 1
    return out
