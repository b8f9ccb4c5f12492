"""The assignment that LOOK-M's three merges share: each evicted key goes to the kept key it resembles most.

LOOK-M (Wan et al. 2024), section 3.3, eq. 9: j(i) = argmax over kept j of cos(k_i, k_j). Keys decide; values follow
with the same targets and weights. Where the paper is silent: ties go to the lowest index; an evicted key of norm zero
has no direction and is dropped unmerged; a kept key of norm zero attracts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykvedge.plans.stages.base import Head


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


def assign(head: Head) -> Assignment:
    """Targets of all evicted tokens of one KV head."""
    keys = head.k.astype(np.float64)
    norm = np.sqrt(np.einsum("td,td->t", keys, keys))
    evicted = np.ones(len(keys), dtype=bool)
    evicted[head.kept] = False
    source = np.flatnonzero(evicted & (norm > 0))
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


def merged(rows: np.ndarray, kept: np.ndarray, to: Assignment, terms: np.ndarray) -> np.ndarray:
    """(rows[j] + sum of the terms that go to j) / (L_j + 1) for every kept j.

    rows: [T, d] original rows; terms: [m, d], one per evicted token. Returns [n, d] float64.
    """
    out = rows[kept].astype(np.float64)
    np.add.at(out, to.target, terms)
    return out / (to.count + 1)[:, None]


def means(head: Head, to: Assignment) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of the kept tokens, each the plain mean of itself and what goes to it. [n, d] float64 each."""
    return (merged(head.k, head.kept, to, head.k[to.source]), merged(head.v, head.kept, to, head.v[to.source]))
