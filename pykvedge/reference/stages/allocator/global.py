"""Global rank: one ranking of all scores of all layers and heads says how many tokens each head keeps.

Of all L * Hkv * T scores the largest win, and a head keeps as many tokens as it has winners (KVzip, Kim et al.
2025, arXiv:2505.23416, section 3.3; AdaKV over layers). A share `floor` of the even budget is every head's own
and goes to its own best tokens first: 0 is KVzip's, 0.2 AdaKV's safeguard. For scores that mean the same in every
head, as attention does; norms and cosines do not.
"""
# ruff: noqa: N999 - named as it is registered; members are imported by name

from __future__ import annotations

import math

import numpy as np

from pykvedge.reference.stages.base import Prompt, Settings


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """[L, Hkv] int64, whose sum is that of even budgets. Ties go to the lower layer, then head; if all tie, evenly."""
    scores = prompt.scores if prompt.attention is None else prompt.attention
    n_layers, n_heads_kv, n_tokens = scores.shape
    free = scores[:, :, : n_tokens - prompt.recent]
    held = max(prompt.recent, 1)  # of every head, so that none is left empty
    base = prompt.budget - held
    own = math.floor(settings["floor"] * base + 1e-9)
    if own == base or free.size == 0 or free.min() == free.max():
        return np.full((n_layers, n_heads_kv), prompt.budget, dtype=np.int64)
    rest = -np.sort(-free, axis=2)[:, :, own : n_tokens - held].reshape(n_layers * n_heads_kv, -1)
    best = np.argsort(-rest.reshape(-1), kind="stable")[: len(rest) * (base - own)]
    won = np.bincount(best // rest.shape[1], minlength=len(rest))
    return (won + own + held).reshape(n_layers, n_heads_kv)


SUMMARY = "one ranking over all layers and heads"
SOURCE = "KVzip, section 3.3"
BY_PLACE = True  # equal scores go to the lower layer, then head
