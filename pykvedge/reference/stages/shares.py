"""Turning real shares of a budget into whole numbers that add up to it."""

from __future__ import annotations

import numpy as np


def fill_up(shares: np.ndarray, total: float, most: float, least: float = 0) -> np.ndarray:
    """Shares scaled to `total`, none above `most` and none below `least`; the others share what that frees or costs.

    They do so in proportion, or evenly where none has a share to take it in proportion to. What exceeds `most` is fixed
    there before what falls short of `least` is. shares [n] float64 >= 0; least * n <= total <= most * n.
    """
    out = shares.astype(np.float64)
    full, short = np.zeros(len(out), dtype=bool), np.zeros(len(out), dtype=bool)
    while True:
        free = ~(full | short)
        left, room = total - most * full.sum() - least * short.sum(), out[free]
        out[free] = room * (left / room.sum()) if room.sum() > 0 else left / max(len(room), 1)
        if (over := free & (out > most)).any():
            out[over], full = most, full | over
        elif (under := free & (out < least)).any():
            out[under], short = least, short | under
        elif free.any() or not full.any():
            return out
        else:  # filling up to `least` took more than was left: the full ones give it back
            out[full] = (total - least * short.sum()) / full.sum()
            return out


def round_shares(shares: np.ndarray, total: int, most: int, least: int = 0) -> np.ndarray:
    """Whole numbers [n] int64 that add up to `total`, none above `most` and none below `least`.

    Rounded by the largest remainder, ties to the lower index. least * n <= total <= most * n.
    """
    real = fill_up(shares, total, most, least)
    out = np.floor(real + 1e-9).astype(np.int64)
    order = np.argsort(-np.round((real - out) * 1e9), kind="stable")
    while (left := total - int(out.sum())) > 0:
        out[[i for i in order if out[i] < most][:left]] += 1
    return out
