"""Value norm: a value of a large norm moves the output more, so the highest norms stay.

MixKV (section 3.3) uses the value norm as the intrinsic importance of a token, beside attention. The scorer protects no
token by itself; `recent` protects the end of the prompt.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Layer, Settings


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64: ||v||."""
    return np.linalg.norm(layer.v.astype(np.float64), axis=-1)


SUMMARY = "values with a large norm win"
SOURCE = "MixKV, section 3.3"
