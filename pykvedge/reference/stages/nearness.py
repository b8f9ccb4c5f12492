"""The assignment by place: each evicted token goes to the anchor that is nearest to it, ties to the left one.

Elastic Cache (Liu et al. 2024), eq. 2, calls an anchor and what goes to it a bucket; PrefixKV (Wang et al. 2024),
table 12, calls the same merging by position.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head
from pykvedge.reference.stages.similarity import Assignment, evicted


def assign_nearest(head: Head, anchors: np.ndarray) -> Assignment:
    """Targets of all evicted tokens of one KV head. anchors: [a] positions in head.kept, ascending; may be empty."""
    source = np.flatnonzero(evicted(head))
    n_kept = len(head.kept)
    if not len(anchors):
        return Assignment(source[:0], source[:0], np.zeros(0), np.zeros(n_kept, dtype=np.int64))
    place = head.kept[anchors].astype(np.int64)
    right = np.searchsorted(place, source)
    left = np.maximum(right - 1, 0)
    right = np.minimum(right, len(place) - 1)
    nearest = np.where(np.abs(source - place[left]) <= np.abs(place[right] - source), left, right)
    target = anchors[nearest]
    return Assignment(source, target, np.ones(len(source)), np.bincount(target, minlength=n_kept))
