"""DART: keeps rows that are least similar to a few pivots (Wen et al. 2025, arXiv:2502.11494), on embeddings.

The paper uses keys of the model's second layer. This pruner uses the encoder's rows, before the model runs.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import ImageRows, Settings


def prune(image: ImageRows, n: int, settings: Settings) -> np.ndarray:
    """Returns [n] int64: the pivots (rows of the largest L1 norm), and per pivot the rows of the lowest cosine to it.

    The other rows are divided evenly among the pivots; the first pivots get one more. Ties go to the first row.
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


SUMMARY = "embedding rows that differ most from a few pivot rows"
SOURCE = (
    "Wen et al. 2025, Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters "
    "More, arXiv:2502.11494"
)
