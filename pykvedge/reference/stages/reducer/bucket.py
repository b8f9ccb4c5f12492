"""Buckets: the prompt is cut halfway between the anchors, and an anchor's row becomes the mean of its bucket.

Elastic Cache (Liu et al. 2024), section 3.2, eq. 2 and 3: anchors are the kept tokens, and each evicted one goes to the
nearest, ties to the left, keys and values alike. The equations let the protected first and last tokens receive, the
released code does not; here they stay as they were, unless `into_protected` is set.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import assign_nearest, means


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Merged keys and values, [n, d] float64 each, and with bias = mass [n] biases.

    Without an anchor the evicted rows are dropped.
    """
    anchor = np.ones(len(head.kept), dtype=bool) if settings["into_protected"] else ~head.protected[head.kept]
    return means(head, assign_nearest(head, np.flatnonzero(anchor)), settings)


SUMMARY = "average each evicted pair into the nearest kept one that is not protected"
SOURCE = "Elastic Cache, eq. 2 and 3"
