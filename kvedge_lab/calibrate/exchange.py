"""Exchanges shares of the budget between KV heads, as long as one head gains more than another loses.

After the code of Zweiger et al. 2026, Fast KV Compaction via Attention Matching (arXiv:2602.16284). Every head has a
curve: what its kept share costs the answers. All heads start with equal shares of the pairs. One small step at a time
moves from the head that loses least to the head that gains most. In that code a step is a thousandth of all pairs (a
third of an even share with 288 heads), and a head cannot give its last step; the median head of their Qwen3-4B has one
step. Here an even share is 50 steps, and the floor is a setting. Shares are counted in steps, so they add up exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvedge.errors import UsageError

STEPS = 50  # steps in an even share
FLOOR = 0.1  # the least share of a head, as a part of an even share
SMALLEST = 0.005  # smallest target
_DIGITS = 12  # digits of nats; smaller differences count as equal


def check_targets(targets: Sequence[float]) -> None:
    """Raises UsageError for budgets that cannot be targets of an exchange."""
    if not targets or any(not SMALLEST <= t < 1 for t in targets):
        raise UsageError(f"targets must be shares of the prompt from {SMALLEST} to below 1, for example 0.05,0.1,0.2")


def costs(points: np.ndarray, losses: np.ndarray, targets: Sequence[float], most: int) -> np.ndarray:
    """Returns what 0 to `most` steps cost each head, [N, most + 1], averaged over the targets.

    points [n]: kept shares of the prompt, ascending. losses [N, n]: each head's loss at each point, in nats. At a
    budget t, a head with u steps keeps the share u t / STEPS of the prompt. Between two points the loss is
    interpolated linearly; outside it is constant.
    """
    kept = np.outer(targets, np.arange(most + 1) / STEPS)
    return np.array([np.interp(kept, points, curve).mean(axis=0) for curve in losses])


def exchange(points: np.ndarray, losses: np.ndarray, targets: Sequence[float], floor: float = FLOOR) -> np.ndarray:
    """Returns shares [N] float64 of all pairs, with sum 1, each at least `floor` of an even share.

    Arguments: see costs(). In every turn the head that gains most by a step gets a step from the head above the floor
    that loses least, if the gain is larger than the loss. Ties go to the first head. Raises UsageError.
    """
    check_targets(targets)
    n_heads = len(losses)
    least = int(np.ceil(floor * STEPS - 1e-9))
    most = int(np.ceil(STEPS / min(targets)))  # the whole prompt at the smallest budget; more changes nothing
    gains = np.round(-np.diff(costs(points, losses, targets, most), axis=1, append=np.nan), _DIGITS)
    gains[:, most] = 0  # gain of one more step, by the number of steps of a head
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
