"""Heads: calibrated scores of the query heads share out the budget.

SparseMM (Wang et al. 2025, ICCV): few heads look at what an answer is read from. Beyond the recent tokens every KV
head gets a share `ratio` of the even budget, and the rest goes by the visual scores of its query heads. HeadKV (Fu et
al. 2024, arXiv:2410.19258): the same with retrieval scores, and 1 / `beta` of the even budget goes by them. In both,
scores are divided by their sum over all layers and heads. The query heads of a group add up (for HeadKV that is the
mean of their budgets). The released codes round each head by itself and cut what exceeds the prompt, so that totals are
missed, with a few strong heads by a quarter; here what exceeds the prompt goes to the others in proportion, and the
largest remainder meets the total. `rounding = official` does as they do.
"""

from __future__ import annotations

import numpy as np

from pykvedge.errors import ProfileError
from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import round_shares


def weights(scores: np.ndarray, n_heads_kv: int, power: float) -> np.ndarray:
    """[L, Hkv] of sum 1: each KV head's part of all scores. scores [L, H]; if all are 0 they count as equal."""
    scores = scores.astype(np.float64)
    total = scores.sum()
    scores = (scores / total if total > 0 else np.ones_like(scores)) ** power
    return (scores / scores.sum()).reshape(len(scores), n_heads_kv, -1).sum(axis=2)


def own_part(base: int, settings: Settings) -> int:
    """Pairs that every KV head gets beside the recent ones, whatever its scores."""
    if settings["rule"] == "sparsemm":
        return int(np.floor(base * settings["ratio"] + 1e-9))
    return base - int(np.floor(base / settings["beta"] + 1e-9))


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """[L, Hkv] int64; the sum over layers and heads is theirs times the even budget, unless rounding is official."""
    _, n_heads_kv, n_tokens = prompt.scores.shape
    if prompt.profile is None:
        raise ProfileError("allocator 'heads' needs a profile; make one with `kvedge calibrate heads`")
    held = max(prompt.recent, 1)  # of every head, so that none is left empty
    base, most = prompt.budget - held, n_tokens - held
    own = own_part(base, settings)
    share = weights(prompt.profile.values, n_heads_kv, settings["power"])
    left = (base - own) * share.size
    if settings["rounding"] == "exact":
        counts = round_shares(share.reshape(-1), left, most - own).reshape(share.shape)
    else:
        counts = np.minimum(np.rint(share * left).astype(np.int64), most - own)
    return counts + own + held


SUMMARY = "more for the heads that a calibration found to look at what answers are read from"
SOURCE = "SparseMM; HeadKV"
BY_PLACE = True  # a profile belongs to the heads of one model
