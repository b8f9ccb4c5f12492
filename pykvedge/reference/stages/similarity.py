"""Assigns evicted rows to kept rows, and merges them. Several reducers share this code.

LOOK-M (Wan et al. 2024), section 3.3, eq. 9: j(i) = argmax over kept j of cos(k_i, k_j). Keys decide the target;
values use the same targets and weights. Where the paper is silent: ties go to the lowest index; an evicted key of norm
zero has no direction and is dropped unmerged; a kept key of norm zero attracts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pykvedge.reference.stages.base import Head, Settings

Terms = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Assignment:
    """The targets of m evicted tokens."""

    source: np.ndarray  # [m] int64 token indices
    target: np.ndarray  # [m] int64 positions in kept
    weight: np.ndarray  # [m] float64 cosine similarity to the target
    count: np.ndarray  # [n] int64, L_j: number of tokens assigned to each kept token

    def above_mean(self) -> Assignment:
        """Returns the assignment without tokens whose similarity is below the mean (by more than rounding)."""
        if not len(self.weight):
            return self
        stays = self.weight >= self.weight.mean() - 1e-6
        target = self.target[stays]
        count = np.bincount(target, minlength=len(self.count))
        return Assignment(self.source[stays], target, self.weight[stays], count)


def evicted(head: Head) -> np.ndarray:
    """Returns [T] bool: the evicted tokens of one KV head."""
    out = np.ones(len(head.k), dtype=bool)
    out[head.kept] = False
    return out


def assign(head: Head) -> Assignment:
    """Assigns every evicted token of one KV head to the kept token with the most similar key."""
    keys = head.k.astype(np.float64)
    norm = np.sqrt(np.einsum("td,td->t", keys, keys))
    source = np.flatnonzero(evicted(head) & (norm > 0))
    n_kept = len(head.kept)
    if not (norm[head.kept] > 0).any():
        source = source[:0]  # no kept key has a direction: all evicted tokens are dropped
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = keys / norm[:, None]
    # einsum sums every pair in the same order, so equal keys give equal similarities and the tie rule holds
    similarity = np.einsum("id,jd->ij", unit[source], unit[head.kept])
    similarity[:, norm[head.kept] == 0] = -np.inf
    if not len(source):
        return Assignment(source, source, np.zeros(0), np.zeros(n_kept, dtype=np.int64))
    target = similarity.argmax(axis=1)
    weight = similarity[np.arange(len(source)), target]
    return Assignment(source, target, weight, np.bincount(target, minlength=n_kept))


def assign_nearest(head: Head, anchors: np.ndarray) -> Assignment:
    """Assigns each evicted token of one KV head to the nearest anchor in the prompt; ties go to the left.

    Elastic Cache (Liu et al. 2024), eq. 2, calls an anchor and its evicted tokens a bucket; PrefixKV (Wang et al.
    2024), table 12, names this merging by position. anchors: [a] positions in head.kept, ascending; may be empty.
    """
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


def masses(head: Head, settings: Settings) -> np.ndarray:
    """Returns [T] float64: the number of rows that each row stands for: e^b for bias b if bias = mass, else 1."""
    if settings.get("bias") != "mass" or head.bias is None:
        return np.ones(len(head.k))
    return np.exp(head.bias.astype(np.float64))


def merge(head: Head, to: Assignment, settings: Settings, terms: Terms) -> tuple[np.ndarray, ...]:
    """Merges evicted rows into kept rows: row_j <- (m_j row_j + sum m_i terms_i) / (m_j + sum m_i).

    terms(rows) -> [m, d]: what each evicted token adds, from the original rows [T, d]. m: see masses(). Returns keys
    and values [n, d] float64. With bias = mass, also returns [n] float64 b_j = ln(m_j + sum_i m_i): a merged row then
    receives the attention of all its rows, exactly if their keys are equal, else a little less. No paper has biases.
    """
    mass, kept = masses(head, settings), head.kept
    total = mass[kept] + np.bincount(to.target, mass[to.source], minlength=len(kept))

    def merged(rows: np.ndarray) -> np.ndarray:
        out = mass[kept, None] * rows[kept]
        np.add.at(out, to.target, mass[to.source, None] * terms(rows))
        return out / total[:, None]

    if settings.get("bias") != "mass":
        return merged(head.k), merged(head.v)
    return merged(head.k), merged(head.v), np.log(total)


def means(head: Head, to: Assignment, settings: Settings) -> tuple[np.ndarray, ...]:
    """Merges as merge() does; each kept row becomes the plain mean of itself and the rows assigned to it."""
    return merge(head, to, settings, lambda rows: rows[to.source])
