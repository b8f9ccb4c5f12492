"""The assignments that several merges share. LOOK-M's: each evicted key goes to the kept key it resembles most.

LOOK-M (Wan et al. 2024), section 3.3, eq. 9: j(i) = argmax over kept j of cos(k_i, k_j). Keys decide; values follow
with the same targets and weights. Where the paper is silent: ties go to the lowest index; an evicted key of norm zero
has no direction and is dropped unmerged; a kept key of norm zero attracts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pykvedge.reference.stages.base import Head, Settings

Terms = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Assignment:
    """m evicted tokens and where they go."""

    source: np.ndarray  # [m] int64 token indices
    target: np.ndarray  # [m] int64 positions in kept
    weight: np.ndarray  # [m] float64 cosine similarity to the target
    count: np.ndarray  # [n] int64, L_j: how many go to each kept token

    def above_mean(self) -> Assignment:
        """Without the tokens whose similarity lies below the mean of all, by more than rounding."""
        if not len(self.weight):
            return self
        stays = self.weight >= self.weight.mean() - 1e-6
        target = self.target[stays]
        count = np.bincount(target, minlength=len(self.count))
        return Assignment(self.source[stays], target, self.weight[stays], count)


def evicted(head: Head) -> np.ndarray:
    """[T] bool: the tokens of one KV head that do not stay."""
    out = np.ones(len(head.k), dtype=bool)
    out[head.kept] = False
    return out


def assign(head: Head) -> Assignment:
    """Targets of all evicted tokens of one KV head by the similarity of keys."""
    keys = head.k.astype(np.float64)
    norm = np.sqrt(np.einsum("td,td->t", keys, keys))
    source = np.flatnonzero(evicted(head) & (norm > 0))
    n_kept = len(head.kept)
    if not (norm[head.kept] > 0).any():
        source = source[:0]  # no direction to follow: everything is dropped
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
    """Each evicted token of one KV head goes to the anchor that is nearest to it in the prompt, ties to the left one.

    Elastic Cache (Liu et al. 2024), eq. 2, calls an anchor and what goes to it a bucket; PrefixKV (Wang et al. 2024),
    table 12, calls the same merging by position. anchors: [a] positions in head.kept, ascending; may be empty.
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
    """[T] float64: how many rows each row counts as. With bias = mass a row of bias b is e^b rows, else 1."""
    if settings.get("bias") != "mass" or head.bias is None:
        return np.ones(len(head.k))
    return np.exp(head.bias.astype(np.float64))


def merge(head: Head, to: Assignment, settings: Settings, terms: Terms) -> tuple[np.ndarray, ...]:
    """Keys and values [n, d] float64 of the kept tokens: row_j <- (m_j row_j + sum m_i terms_i) / (m_j + sum m_i).

    terms(rows) -> [m, d]: what each evicted token adds, of the original rows [T, d]. m: masses, 1 unless rows were
    merged before. With bias = mass also [n] float64 b_j = ln(m_j + sum_i m_i), so that a row is attended to like all
    that it stands for: exactly where their keys are equal, else a little less. Our own; the papers have none.
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
    """Like merge, each kept row the plain mean of itself and what goes to it."""
    return merge(head, to, settings, lambda rows: rows[to.source])
