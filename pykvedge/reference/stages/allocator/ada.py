"""Adaptive heads: within a layer, the heads with the largest scores receive the most pairs.

AdaKV (Feng et al. 2024, arXiv:2407.11550), section 4: the n * Hkv largest scores of a layer's heads win, and a head
receives as many pairs as it has winners. Every head first receives a share `floor` of the even budget. With `normalize`
a head's scores are multiplied by the share of their sum that lies in the head's top scores, as in later users of AdaKV.
The released code rounds each head separately and can miss the total (`rounding` = official); here the largest remainder
meets the total. MixKV's released code allocates by attention alone and selects by the mixture; `budget_score` = mix
allocates by the mixture too.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import round_shares


def winners(scores: np.ndarray, base: int) -> np.ndarray:
    """Returns how many of the Hkv * base largest scores [Hkv, n] each head has. Ties: lower head, then lower token."""
    n_heads_kv, n_tokens = scores.shape
    best = np.argsort(-scores.reshape(-1), kind="stable")[: n_heads_kv * base]
    return np.bincount(best // n_tokens, minlength=n_heads_kv)


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64; every layer's sum is Hkv times the even budget, except with `rounding` = official."""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    attention = prompt.attention if settings["budget_score"] == "attention" else None
    all_scores = prompt.scores if attention is None else attention
    held = max(prompt.recent, 1)  # every head keeps at least one pair
    base, most = prompt.budget - held, n_tokens - held
    out = np.zeros((n_layers, n_heads_kv), dtype=np.int64)
    for i in range(n_layers):
        scores = all_scores[i, :, : n_tokens - prompt.recent]
        if settings["normalize"] and scores.min(initial=0.0) >= 0:  # negative scores have no meaningful sum
            top = -np.sort(-scores, axis=1)[:, :base]
            total = scores.sum(axis=1)
            share = np.divide(top.sum(axis=1), total, out=np.zeros(n_heads_kv), where=total > 0)
            scores = scores * share[:, None]
        won = winners(scores, base) * (1 - settings["floor"])
        if settings["rounding"] == "official":  # rounds half to even, each head separately
            out[i] = np.minimum(np.round(won + int(base * settings["floor"])), most) + held
        else:
            out[i] = round_shares(won + base * settings["floor"], base * n_heads_kv, most) + held
    return out


SUMMARY = "within a layer, more for heads with the largest scores"
SOURCE = "AdaKV, section 4"
BY_PLACE = True  # equal remainders go to the lower head
