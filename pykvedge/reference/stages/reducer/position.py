"""Position: each evicted row is averaged into the kept row that is nearest to it in the prompt.

PrefixKV (Wang et al. 2024), table 12, "Position": similarity is minus the distance in tokens. Protected tokens receive
evicted rows too. Ties go to the left.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import assign_nearest, means


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Returns merged keys and values, [n, d] float64 each; with bias = mass also biases [n]."""
    return means(head, assign_nearest(head, np.arange(len(head.kept))), settings)


SUMMARY = "average each evicted pair into the nearest kept pair"
SOURCE = "PrefixKV, table 12"
