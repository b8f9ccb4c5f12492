"""Global rank: one ranking of the scores of all layers and heads decides how many tokens each head keeps.

The largest of all L * Hkv * T scores win, and a head keeps as many tokens as it has winners (KVzip, Kim et al. 2025,
arXiv:2505.23416, section 3.3; AdaKV over layers). Every head first receives a share `floor` of the even budget for its
best tokens: 0 is KVzip's value, 0.2 is AdaKV's safeguard. Scores must have the same meaning in every head. Attention
has; norms and cosines have not.
"""
# ruff: noqa: N999 - the module has the name of the member, which is imported by name

from __future__ import annotations

import math

import numpy as np

from pykvedge.reference.stages.base import Prompt, Settings


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64 with the sum of even budgets. Ties: lower layer, then head; all equal: even budgets."""
    scores = prompt.scores if prompt.attention is None else prompt.attention
    n_layers, n_heads_kv, n_tokens = scores.shape
    free = scores[:, :, : n_tokens - prompt.recent]
    held = max(prompt.recent, 1)  # every head keeps at least one pair
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
