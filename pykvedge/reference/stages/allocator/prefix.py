"""Prefix: every layer keeps the same share of its importance, so layers with few important tokens keep few.

PrefixKV (Wang et al. 2024), section 3.3, eq. 1 and 2: a layer's scores, scaled to the sum 1 and sorted, are its
priority sequence. For a share p, each layer needs the shortest prefix of its sequence with the sum p. Bisection finds
the p that meets the budget. If no p meets the budget, the closest lengths are scaled in proportion, so the sum is
always exact. This is the paper's online form. Offline (section 3.3, "offline estimation"), the share of the prompt that
each layer keeps comes from a profile, the mean over a few prompts (`kvedge calibrate prefix`): source = profile.
Between two calibrated budgets shares are interpolated linearly, from 0 at budget 0 to 1 at budget 1.
"""

from __future__ import annotations

import numpy as np

from pykvedge.errors import ProfileError
from pykvedge.reference.stages.base import ProfileTable, Prompt, Settings
from pykvedge.reference.stages.shares import round_shares

HALVINGS = 64


def cumulative_priority(scores: np.ndarray) -> np.ndarray:
    """P[l, n]: the sum of the n + 1 largest importances of layer l; the last is 1. scores [L, Hkv, T] -> [L, T]."""
    importance = np.maximum(scores.mean(axis=1), 0)
    total = importance.sum(axis=1, keepdims=True)
    even = np.full_like(importance, 1 / importance.shape[1])
    importance = np.divide(importance, total, out=even, where=total > 0)
    return np.cumsum(-np.sort(-importance, axis=1), axis=1)


def prefix_lengths(priority: np.ndarray, target: int) -> np.ndarray:
    """Returns [L] int64: the shortest prefixes with the sum p, for the p whose total length is closest to `target`.

    priority: [L, T], each row ascending.
    """
    n_tokens = priority.shape[1]
    low, high = 0.0, 1.0
    best = np.zeros(len(priority), dtype=np.int64)
    closest: int | None = None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        lengths = np.array([np.searchsorted(row, middle - 1e-12) + 1 for row in priority])
        lengths = np.minimum(lengths, n_tokens)
        off = int(lengths.sum()) - target
        if closest is None or abs(off) < closest:
            best, closest = lengths, abs(off)
        if off == 0:
            break
        low, high = (middle, high) if off < 0 else (low, middle)
    return best


def calibrated(profile: ProfileTable, budget: float) -> np.ndarray:
    """Returns [L]: the share of the prompt that each layer keeps, interpolated at the share `budget` of the prompt."""
    budgets = [0.0, *profile.budgets.astype(np.float64), 1.0]
    return np.array([np.interp(budget, budgets, [0.0, *row, 1.0]) for row in profile.values.astype(np.float64)])


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64, equal within a layer; the sum over layers is L times the even budget."""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    target = prompt.budget * n_layers
    if settings["source"] == "online":
        lengths = prefix_lengths(cumulative_priority(prompt.scores), target).astype(np.float64)
    elif prompt.profile is None:
        raise ProfileError("allocator 'prefix' needs a profile; make one with `kvedge calibrate prefix`")
    else:
        lengths = calibrated(prompt.profile, prompt.budget / n_tokens)
    counts = round_shares(lengths, target, n_tokens, least=max(1, prompt.recent))
    return np.repeat(counts[:, None], n_heads_kv, axis=1)


SUMMARY = "every layer keeps the same share of its importance"
SOURCE = "PrefixKV, eq. 1 and 2"
