"""Shares of the budget are exchanged between KV heads for as long as one gains more than another loses.

After the code of Zweiger et al. 2026, Fast KV Compaction via Attention Matching (arXiv:2602.16284): every head has a
curve of what its kept share costs the answers, all start with equal shares of the pairs, and a small step moves at a
time, from the head that misses it least to the one that gains most. There a step is a thousandth of all pairs, a third
of an even share in a model of 288 heads, and a head cannot give its last step; the median head of their Qwen3-4B stands
there. Here an even share is 50 steps, and the floor is a setting. Shares are counted in steps, so they add up exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvedge.errors import UsageError

STEPS = 50  # of an even share
FLOOR = 0.1  # of an even share, which no head falls below
SMALLEST = 0.005  # target
_DIGITS = 12  # of nats: what differs only after them counts as equal


def check_targets(targets: Sequence[float]) -> None:
    """Refuses what are no budgets to exchange for. Raises UsageError."""
    if not targets or any(not SMALLEST <= t < 1 for t in targets):
        raise UsageError(f"targets must be shares of the prompt from {SMALLEST} to below 1, for example 0.05,0.1,0.2")


def costs(points: np.ndarray, losses: np.ndarray, targets: Sequence[float], most: int) -> np.ndarray:
    """What 0 to `most` steps cost each head, [N, most + 1], averaged over the targets.

    points [n]: kept shares of the prompt, ascending. losses [N, n]: of each head at each, in nats. Of a budget t a head
    of u steps keeps the share u t / STEPS of the prompt. Between two points the loss lies on a straight line, beyond
    them it is constant.
    """
    kept = np.outer(targets, np.arange(most + 1) / STEPS)
    return np.array([np.interp(kept, points, curve).mean(axis=0) for curve in losses])


def exchange(points: np.ndarray, losses: np.ndarray, targets: Sequence[float], floor: float = FLOOR) -> np.ndarray:
    """Shares [N] float64 of all pairs, of sum 1, each at least `floor` of an even one.

    As costs. In every turn the head that gains most by a step gets one from that which loses least by it, of the others
    that are above the floor, if it gains more than that loses; of equal heads the first. Raises UsageError.
    """
    check_targets(targets)
    n_heads = len(losses)
    least = int(np.ceil(floor * STEPS - 1e-9))
    most = int(np.ceil(STEPS / min(targets)))  # all of the prompt even at the smallest budget: constant from there
    gains = np.round(-np.diff(costs(points, losses, targets, most), axis=1, append=np.nan), _DIGITS)
    gains[:, most] = 0  # of one step more, by the steps that a head has
    steps, head = np.full(n_heads, STEPS), np.arange(n_heads)
    while n_heads > 1:
        gain = gains[head, np.minimum(steps, most)]
        to = int(gain.argmax())
        loss = np.where(steps > least, gains[head, np.minimum(steps - 1, most)], np.inf)
        loss[to] = np.inf
        giver = int(loss.argmin())
        if gain[to] <= loss[giver]:
            break
        steps[to] += 1
        steps[giver] -= 1
    return steps / (STEPS * n_heads)
