"""DART: rows that are least like a few pivots (Wen et al. 2025, arXiv:2502.11494), on embeddings.

The paper looks at keys of the model's second layer. Here it is the rows that the encoder made, before the model runs.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import ImageRows, Settings


def prune(image: ImageRows, n: int, settings: Settings) -> np.ndarray:
    """[n] int64: the pivots, rows of the largest L1 norm, and for each in turn the rows of the lowest cosine to it.

    The rows that are not pivots are shared evenly among them, earlier pivots have one more. Equal rows: the first.
    """
    rows = image.rows.astype(np.float64)
    n_pivots = min(settings["pivots"], n)
    norms = np.abs(rows).sum(axis=1)
    pivots = np.argsort(-norms, kind="stable")[:n_pivots]
    unit = image.unit()
    left = np.ones(len(rows), dtype=bool)
    left[pivots] = False
    for j, pivot in enumerate(pivots):
        share = (n - n_pivots) // n_pivots + (j < (n - n_pivots) % n_pivots)
        found = np.flatnonzero(left)
        left[found[np.argsort(unit[found] @ unit[pivot], kind="stable")[:share]]] = False
    return np.flatnonzero(~left)


SUMMARY = "rows least like a few pivots, on embeddings"
SOURCE = (
    "Wen et al. 2025, Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters "
    "More, arXiv:2502.11494"
)
