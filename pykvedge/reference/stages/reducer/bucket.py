"""Buckets: the prompt is cut halfway between the anchors, and an anchor's row becomes the mean of its bucket.

Elastic Cache (Liu et al. 2024), section 3.2, eq. 2 and 3: anchors are the kept tokens. Each evicted token goes to the
nearest anchor, ties to the left, for keys and values. In the equations, protected first and last tokens are anchors
too; in the released code they are not. Here they are anchors only if `into_protected` is set.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import assign_nearest, means


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Returns merged keys and values, [n, d] float64 each; with bias = mass also biases [n].

    Without an anchor the evicted rows are dropped.
    """
    anchor = np.ones(len(head.kept), dtype=bool) if settings["into_protected"] else ~head.protected[head.kept]
    return means(head, assign_nearest(head, np.flatnonzero(anchor)), settings)


SUMMARY = "average each evicted pair into the nearest kept pair that is not protected"
SOURCE = "Elastic Cache, eq. 2 and 3"
