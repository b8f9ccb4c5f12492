"""Max-min diversity: no two rows that are kept are much alike (DivPrune, Alvar et al. 2025, arXiv:2503.02175)."""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import ImageRows, Pruner, Settings


def farthest(unit: np.ndarray, n: int) -> list[int]:
    """n rows of unit [N, D] in the order in which they are taken, by the distance 1 - cosine.

    First the row whose nearest other row is farthest, then always the one farthest from the nearest that is taken.
    Equal ones: the first.
    """
    likeness = unit @ unit.T
    np.fill_diagonal(likeness, -np.inf)
    taken = [int(np.argmin(likeness.max(axis=1)))]
    nearest = unit @ unit[taken[0]]
    while len(taken) < n:
        nearest[taken] = np.inf
        taken.append(int(np.argmin(nearest)))
        nearest = np.maximum(nearest, unit @ unit[taken[-1]])
    return taken


def prune(image: ImageRows, n: int, settings: Settings) -> np.ndarray:
    """[n] int64, ascending."""
    return np.sort(np.array(farthest(image.unit(), n)))


MEMBER = Pruner(
    name="maxmin",
    summary="rows that differ from each other the most",
    source="Alvar et al. 2025, DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models, "
    "arXiv:2503.02175",
    prune=prune,
)
