"""Turns real shares of a budget into whole numbers with the right sum."""

from __future__ import annotations

import numpy as np


def fill_up(shares: np.ndarray, total: float, most: float, least: float = 0) -> np.ndarray:
    """Scales shares [n] float64 >= 0 to the sum `total`, with each share in [least, most]. Returns [n] float64.

    A share outside the limits is set to the limit, first those above `most`, then those below `least`. The other shares
    take the difference in proportion, or evenly if all of them are 0. least * n <= total <= most * n.
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
        else:  # the shares fixed at `least` took more than was left: the shares fixed at `most` pay the difference
            out[full] = (total - least * short.sum()) / full.sum()
            return out


def round_shares(shares: np.ndarray, total: int, most: int, least: int = 0) -> np.ndarray:
    """Returns whole numbers [n] int64 with the sum `total`, each between `least` and `most`.

    Rounds by the largest remainder; ties go to the lower index. least * n <= total <= most * n.
    """
    real = fill_up(shares, total, most, least)
    out = np.floor(real + 1e-9).astype(np.int64)
    order = np.argsort(-np.round((real - out) * 1e9), kind="stable")
    while (left := total - int(out.sum())) > 0:
        out[[i for i in order if out[i] < most][:left]] += 1
    return out
