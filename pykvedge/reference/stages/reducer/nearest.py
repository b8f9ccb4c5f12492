"""Nearest merge: an evicted row joins the kept row with the nearest key, if the key is near; other rows are dropped.

This project's own method. With s(i) = argmin over kept j of |k_i - k_j|, ties to the lowest index, row i joins row s(i)
if |k_i - k_s(i)| <= reach |k_i|. A row stands for m = e^b rows (b: its bias, 0 unless rows were merged before). A row
becomes the mean of all rows that it stands for now:

    M_j = m_j + sum_i m_i,   k_j <- (m_j k_j + sum_i m_i k_i) / M_j,   v_j by the same formula,   b_j = ln M_j

The sums run over i with s(i) = j. With bias = none all m are 1 and there are no b_j.

LOOK-M's averaged merge (Wan et al. 2024, eq. 10) differs in three ways. It compares keys by angle, but attention
depends on their difference: q.k_i - q.k_j is at most |q| |k_i - k_j|. It merges every evicted row, even a very
different one, which blurs rows that an answer needs; a row without a near key is better dropped. And a merged row
counts once, so all other rows gain the attention that the merged rows had.

If keys are equal, a merge loses only positions. Otherwise the merged row receives less attention than its rows did, by
a second-order term in q.(k_i - k_j).
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import Assignment, evicted, means


def assign(head: Head, reach: float) -> Assignment:
    """Assigns evicted tokens of one KV head to the kept token with the nearest key, if it is within `reach`."""
    keys = head.k.astype(np.float64)
    source, kept = np.flatnonzero(evicted(head)), keys[head.kept]
    square = np.einsum("td,td->t", keys, keys)
    # einsum sums every pair in the same order, so equal keys are equally near and the tie rule holds
    near = np.einsum("id,jd->ij", keys[source], kept) - square[head.kept] / 2  # (|k_i|^2 - |k_i - k_j|^2) / 2
    target = near.argmax(axis=1)
    distance = square[source] - 2 * near[np.arange(len(source)), target]
    joins = distance <= reach**2 * square[source]
    source, target = source[joins], target[joins]
    return Assignment(source, target, np.ones(len(source)), np.bincount(target, minlength=len(head.kept)))


def reduce(head: Head, settings: Settings) -> tuple[np.ndarray, ...]:
    """Returns merged keys and values, [n, d] float64 each; with bias = mass also biases [n]."""
    return means(head, assign(head, settings["reach"]), settings)


SUMMARY = "average each evicted pair into the kept pair with the nearest key, if this key is near"
SOURCE = "this project"
