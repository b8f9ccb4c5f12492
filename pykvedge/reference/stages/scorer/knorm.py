"""Key norm: keys of a small norm receive the most attention, so the lowest norms stay.

Devoto et al. 2024 (arXiv:2406.11430), section 3: the score of a token is minus the Euclidean norm of its key. Rotation
does not change a norm. The scorer protects no token by itself; `recent` protects the end of the prompt.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: -||k||."""
    return -np.linalg.norm(layer.k.astype(np.float64), axis=-1)


SUMMARY = "keys with a small norm win"
SOURCE = "Devoto et al. 2024, section 3"
