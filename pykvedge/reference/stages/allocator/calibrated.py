"""Calibrated: every KV head gets the share of all pairs that a calibration found to cost the answers least.

How much a model's answers change as one head keeps less is measured once, head by head, and shares are exchanged
between the heads as long as one gains more than another loses (`kvedge calibrate budgets`; after the code of Zweiger et
al. 2026, Fast KV Compaction via Attention Matching, arXiv:2602.16284). Here the shares become whole numbers: a head's
part of all pairs, none above the prompt, what exceeds it to the others in proportion, as often as need be, and the
largest remainder meets the total. The released code truncates, lets no head keep more than three quarters of the
tokens, and misses the total.

A calibration measures small budgets. What a budget has beyond the share `measured` of the prompt raises the heads that
have least, up to a level: there most heads keep what they need, and one that was left little loses more than the others
gain. So no head has less of a larger budget, and where all are at the level, budgets are even.

`share_of = prompt` grants each head that share of the prompt, whatever the budget: so heads are measured one by one.

For a model without a profile `unmeasured = ada` shares out by the prompt, as allocator ada does with its defaults, and
`unmeasured = variation` by how much the values of image tokens vary along the tokens (scorer modal measures it): what
changes from token to token cannot be had from a neighbour that stays. A head's share goes by the fourth power of its
variation; by a lower one where the logarithms of shares would differ by more than those of the packaged profile do, and
for budgets above `measured`, and where a scorer measures no variation (text alone), as ada.
"""

from __future__ import annotations

import numpy as np

from pykvedge.errors import ProfileError
from pykvedge.reference.stages.allocator import ada
from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import fill_up, round_shares

POWER, SPREAD, LEAST = 4.0, 0.8, 1e-3  # of variations; of the logarithms of shares; of the mean variation
USUAL = {"floor": 0.2, "normalize": True, "budget_score": "attention", "rounding": "exact"}  # of allocator ada


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """[L, Hkv] int64, each at least 1 and what the plan protects by number; in all L * Hkv times the even budget.

    With share_of = prompt the sum is what the shares come to. Raises ProfileError.
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
    """Shares [n] of heads, not of sum 1, by their variation [n] >= 0. Alike where there is none."""
    logs = np.log(np.maximum(variation, max(LEAST * variation.mean(), np.finfo(np.float64).tiny)))
    logs -= logs.mean()
    return np.exp(logs * min(POWER, SPREAD / max(float(logs.std()), 1e-9)))


def raise_poorest(granted: np.ndarray, budget: int) -> np.ndarray:
    """Pairs [n] float64 of an even budget that is above the mean of those granted [n]: what is below a level gets it.

    The heads that are raised to it are those with least, and as many as make it the lowest: fewer would rise above
    others, and of more the richest would have to give.
    """
    ascending = np.sort(granted)
    beyond = budget * granted.size - ascending.sum()
    level = ((np.cumsum(ascending) + beyond) / np.arange(1, granted.size + 1)).min()
    return np.maximum(granted, level)


SUMMARY = "to every head the share of all pairs that costs the answers least, by a calibration"
SOURCE = "Fast KV Compaction via Attention Matching, released code"
BY_PLACE = True  # a profile belongs to the heads of one model
