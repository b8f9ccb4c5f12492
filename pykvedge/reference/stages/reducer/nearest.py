"""Nearest merge: an evicted row joins the kept row whose key is nearest, if it is near; others are dropped.

This project's own. With s(i) = argmin over kept j of |k_i - k_j|, ties to the lowest index, row i joins row s(i) where
|k_i - k_s(i)| <= reach |k_i|. A row stands for m = e^b rows (b: its bias, 0 unless rows were merged before), and
becomes the mean of all that it stands for now:

    M_j = m_j + sum_i m_i,   k_j <- (m_j k_j + sum_i m_i k_i) / M_j,   v_j likewise,   b_j = ln M_j

Sums over i with s(i) = j; with bias = none all m are 1 and there are no b_j.

LOOK-M's averaged merge (Wan et al. 2024, eq. 10) differs in three ways. It goes by the angle between keys, where
attention goes by their difference: q.k_i - q.k_j is at most |q| |k_i - k_j|. It merges whatever is evicted, however
unlike, which blurs rows that an answer looks at; what has nothing near is better forgotten. And a row counts once
however many it stands for, so that everything else gains what they had.

Where keys are equal nothing is lost but positions. Else a row weighs less than its rows did, to second order in
q.(k_i - k_j).
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Head, Settings
from pykvedge.reference.stages.similarity import Assignment, evicted, means


def assign(head: Head, reach: float) -> Assignment:
    """Targets of the evicted tokens of one KV head that have one."""
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
    """Merged keys and values, [n, d] float64 each, and with bias = mass [n] biases."""
    return means(head, assign(head, settings["reach"]), settings)


SUMMARY = "average each evicted pair into the kept one with the nearest key, if it is near, to count there"
SOURCE = "this project"
