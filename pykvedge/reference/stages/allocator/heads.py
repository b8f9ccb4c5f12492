"""Heads: calibrated scores of the query heads divide the budget.

SparseMM (Wang et al. 2025, ICCV): few heads look at the visual content that an answer is read from. Beside the recent
tokens, every KV head receives a share `ratio` of the even budget; the rest is divided by the visual scores of its query
heads. HeadKV (Fu et al. 2024, arXiv:2410.19258) does this with retrieval scores, and divides 1 / `beta` of the even
budget by scores. Both divide scores by their sum over all layers and heads. The scores of the query heads of a group
are added (for HeadKV this is the mean of their budgets). The released codes round each head separately and cut counts
above the prompt, so they miss the total, with a few strong heads by a quarter. Here the excess goes to other heads in
proportion, and the largest remainder meets the total. `rounding = official` follows the released codes.
"""

from __future__ import annotations

import numpy as np

from pykvedge.errors import ProfileError
from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import round_shares


def weights(scores: np.ndarray, n_heads_kv: int, power: float) -> np.ndarray:
    """Returns [L, Hkv] with sum 1: each KV head's part of all scores [L, H]. If all scores are 0, parts are equal."""
    scores = scores.astype(np.float64)
    total = scores.sum()
    scores = (scores / total if total > 0 else np.ones_like(scores)) ** power
    return (scores / scores.sum()).reshape(len(scores), n_heads_kv, -1).sum(axis=2)


def own_part(base: int, settings: Settings) -> int:
    """Returns the pairs that every KV head receives beside the recent tokens, whatever its scores."""
    if settings["rule"] == "sparsemm":
        return int(np.floor(base * settings["ratio"] + 1e-9))
    return base - int(np.floor(base / settings["beta"] + 1e-9))


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64; the sum is L * Hkv * even budget, except with `rounding` = official."""
    _, n_heads_kv, n_tokens = prompt.scores.shape
    if prompt.profile is None:
        raise ProfileError("allocator 'heads' needs a profile; make one with `kvedge calibrate heads`")
    held = max(prompt.recent, 1)  # every head keeps at least one pair
    base, most = prompt.budget - held, n_tokens - held
    own = own_part(base, settings)
    share = weights(prompt.profile.values, n_heads_kv, settings["power"])
    left = (base - own) * share.size
    if settings["rounding"] == "exact":
        counts = round_shares(share.reshape(-1), left, most - own).reshape(share.shape)
    else:
        counts = np.minimum(np.rint(share * left).astype(np.int64), most - own)
    return counts + own + held


SUMMARY = "more for heads that attend to the source of answers, by a calibration"
SOURCE = "SparseMM; HeadKV"
BY_PLACE = True  # a profile belongs to the heads of one model
