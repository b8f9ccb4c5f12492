"""Calibrated: every KV head receives the share of all pairs that a calibration found best for the answers.

A calibration measures, head by head, how much a model's answers change if the head keeps less. Then shares are
exchanged between heads as long as one head gains more than another loses (`kvedge calibrate budgets`; after the code of
Zweiger et al. 2026, Fast KV Compaction via Attention Matching, arXiv:2602.16284). This allocator turns the shares into
whole numbers. A head keeps at most the whole prompt; the excess goes to the other heads in proportion, repeatedly if
needed. The largest remainder meets the total. The released code truncates, limits a head to three quarters of the
tokens, and misses the total.

A calibration measures small budgets. For a budget above the share `measured` of the prompt, the extra pairs raise the
poorest heads to one level. There most heads keep all that they need, and a poor head loses more than the others gain.
So a larger budget never reduces a head, and once all heads are at the level the budgets are even.

`share_of = prompt` gives each head its share of the prompt, whatever the budget, to measure heads one at a time.

For a model without a profile, `unmeasured = ada` allocates by the prompt, as allocator ada does by default.
`unmeasured = variation` allocates by the variation of image tokens' values along the tokens (measured by scorer modal):
a value that changes from token to token cannot be replaced by a neighbour that stays. A head's share is the fourth
power of its variation. The power is smaller if the logarithms of the shares would spread more than in the packaged
profile. For budgets above `measured`, or without a variation (text alone), the allocator works as ada.
"""

from __future__ import annotations

import numpy as np

from pykvedge.errors import ProfileError
from pykvedge.reference.stages.allocator import ada
from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import fill_up, round_shares

POWER, SPREAD, LEAST = 4.0, 0.8, 1e-3  # power of a variation; largest deviation of ln(share); least part of the mean
USUAL = {"floor": 0.2, "normalize": True, "budget_score": "attention", "rounding": "exact"}  # defaults of allocator ada


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64 with the sum L * Hkv * even budget. Each count is at least 1 and `fixed_recent`.

    With share_of = prompt the sum follows from the shares. Raises ProfileError if a profile is missing and required.
    """
    n_tokens, least = prompt.scores.shape[2], max(1, prompt.fixed_recent)
    measured = int(np.floor(settings["measured"] * n_tokens + 1e-9))
    varied = prompt.variation if settings["unmeasured"] == "variation" and prompt.budget <= measured else None
    if prompt.profile is None and varied is not None:
        shares = by_variation(varied.reshape(-1))
        return round_shares(shares, prompt.budget * shares.size, n_tokens, least).reshape(varied.shape)
    if prompt.profile is None and settings["unmeasured"] != "refuse":
        return ada.allocate(prompt, USUAL)
    if prompt.profile is None:
        raise ProfileError("allocator 'calibrated' needs a profile; make one with `kvedge calibrate budgets`")
    shares = prompt.profile.values.astype(np.float64)
    if settings["share_of"] == "prompt":
        return np.clip(np.floor(shares * n_tokens + 0.5), least, n_tokens).astype(np.int64)
    shares = shares.reshape(-1)
    if prompt.budget > measured:
        granted = fill_up(shares, measured * shares.size, n_tokens, min(least, measured))
        shares = raise_poorest(granted, prompt.budget)
    return round_shares(shares, prompt.budget * shares.size, n_tokens, least).reshape(prompt.profile.values.shape)


def by_variation(variation: np.ndarray) -> np.ndarray:
    """Returns the shares [n] of heads, unscaled, by their variation [n] >= 0. Without variation, shares are equal."""
    logs = np.log(np.maximum(variation, max(LEAST * variation.mean(), np.finfo(np.float64).tiny)))
    logs -= logs.mean()
    return np.exp(logs * min(POWER, SPREAD / max(float(logs.std()), 1e-9)))


def raise_poorest(granted: np.ndarray, budget: int) -> np.ndarray:
    """Raises the poorest of the heads' pairs `granted` [n] to one level, to the sum budget * n: [n] float64.

    budget: pairs per head, above the mean of `granted`. The level is the lowest over all numbers of raised heads: fewer
    heads would rise above others, and more heads would include heads above the level.
    """
    ascending = np.sort(granted)
    beyond = budget * granted.size - ascending.sum()
    level = ((np.cumsum(ascending) + beyond) / np.arange(1, granted.size + 1)).min()
    return np.maximum(granted, level)


SUMMARY = "for each head the measured share of all KV pairs that keeps answers best"
SOURCE = "Fast KV Compaction via Attention Matching, released code"
BY_PLACE = True  # a profile belongs to the heads of one model
