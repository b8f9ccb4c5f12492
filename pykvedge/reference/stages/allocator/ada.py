"""Adaptive heads: within a layer, the budget goes where the scores are the largest.

AdaKV (Feng et al. 2024, arXiv:2407.11550), section 4: of all scores of a layer's heads together, the largest n * Hkv
win, and a head gets as many pairs as it has winners; a share `floor` of the even budget is every head's own. With
`normalize` a head's scores count by the share of their mass that lies in its own top scores, as its later users do. The
released code rounds each head by itself and can miss the total (`rounding` set to official); here the largest remainder
meets it. MixKV's released code shares out by attention alone and selects by the mixture; `budget_score` set to mix
shares out by the mixture too.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import round_shares


def winners(scores: np.ndarray, base: int) -> np.ndarray:
    """How many of the Hkv * base largest scores each head has; ties to the lower head, then token. scores [Hkv, n]."""
    n_heads_kv, n_tokens = scores.shape
    best = np.argsort(-scores.reshape(-1), kind="stable")[: n_heads_kv * base]
    return np.bincount(best // n_tokens, minlength=n_heads_kv)


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """[L, Hkv] int64; every layer's sum is Hkv times the even budget, but for the official rounding."""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    attention = prompt.attention if settings["budget_score"] == "attention" else None
    all_scores = prompt.scores if attention is None else attention
    held = max(prompt.recent, 1)  # of every head, so that none is left empty
    base, most = prompt.budget - held, n_tokens - held
    out = np.zeros((n_layers, n_heads_kv), dtype=np.int64)
    for i in range(n_layers):
        scores = all_scores[i, :, : n_tokens - prompt.recent]
        if settings["normalize"] and scores.min(initial=0.0) >= 0:  # mass has no meaning where scores are negative
            top = -np.sort(-scores, axis=1)[:, :base]
            total = scores.sum(axis=1)
            share = np.divide(top.sum(axis=1), total, out=np.zeros(n_heads_kv), where=total > 0)
            scores = scores * share[:, None]
        won = winners(scores, base) * (1 - settings["floor"])
        if settings["rounding"] == "official":  # half to even, head by head
            out[i] = np.minimum(np.round(won + int(base * settings["floor"])), most) + held
        else:
            out[i] = round_shares(won + base * settings["floor"], base * n_heads_kv, most) + held
    return out


SUMMARY = "within a layer, more for the heads with the largest scores"
SOURCE = "AdaKV, section 4"
BY_PLACE = True  # equal remainders go to the lower head
