"""Positions of a sequence are made smaller (kvedge_renumber). The tokens' keys turn by the difference (Rotation.on)."""

from __future__ import annotations

import numpy as np

from pykvedge.errors import UsageError


def renumbered(positions: np.ndarray, taken: np.ndarray, held: np.ndarray, following: int, most: int) -> np.ndarray:
    """Returns the new positions [T] of tokens, so that the next token comes at `most` instead of `following`.

    positions [T] ascend; tokens may share one. taken [T]: positions that a token takes, 1 or all of its image (M-RoPE).
    held [T]: whether any head of any layer still holds the token. A position that no held token takes is a gap.

    The oldest gaps are closed, as many as must be, so that all later distances stay. Where there are too few gaps, the
    last most // 2 positions keep their distances, and all before share the other half in their order. Distances
    never grow. Raises UsageError.
    """
    if most < 1 or (np.diff(positions) < 0).any() or (len(positions) and positions[-1] >= following):
        raise UsageError("positions must ascend and lie before the next one, and at least one must be left")
    surplus = following - most
    if surplus <= 0 or not len(positions):
        return positions.copy()
    change = np.zeros(following + 1, np.int64)
    np.add.at(change, positions[held], 1)
    np.add.at(change, np.minimum(positions + taken, following)[held], -1)
    before = np.concatenate([[0], np.cumsum(np.cumsum(change[:-1]) > 0)])  # [following + 1] that are taken before each
    gaps = np.arange(following + 1) - before
    if gaps[-1] >= surplus:
        first = int(np.argmax(gaps >= surplus))
        moved = before
    else:
        first = following - most // 2
        moved = before * (most - most // 2) // before[first]
    return np.where(positions >= first, positions - surplus, moved[positions])
