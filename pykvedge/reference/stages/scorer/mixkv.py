"""Mixed: the more alike the keys of a head are, the more a token counts for being different, not for being looked at.

MixKV (Liu et al. 2025, arXiv:2510.20707), section 3.3. Importance is the pooled window attention plus the norm of the
value, diversity is how far a key points away from the mean direction of all keys; both are brought to one scale. A
head mixes them by its redundancy r, the mean cosine similarity of two different keys (eq. 4). The paper takes r from
the prompt, the released code from a table averaged over samples (table 4 has both): `source = profile` is such a
table, made by `kvedge calibrate heads --kind redundancy`. Only tokens before the window are mixed; the window is
kept, as far as that is at most half of the budget (its smallest in the paper is two windows; `parts` = 4: a quarter),
and the older tokens of a window that is longer compete by their attention.
Where the paper is silent: a range of zero scales to 0, a key of norm zero has no direction, and r is limited to [0,
1].
"""

from __future__ import annotations

import numpy as np

from pykvedge.errors import ProfileError
from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.window import pooled_attention

EPS = 1e-8
SAME = 1e-6  # of the largest: two keys are as far from their mean, but for rounding


def minmax01(x: np.ndarray) -> np.ndarray:
    """x [n] moved and scaled to [0, 1]; all 0 where x is constant but for rounding."""
    span = x.max() - x.min()
    return (x - x.min()) / (span + EPS) if span > SAME * np.abs(x).max() else np.zeros(len(x))


def scaled_to(x: np.ndarray, mean: float) -> np.ndarray:
    """x [n] in [0, 1], scaled so that its mean is `mean`."""
    return x * mean / (x.mean() + EPS)


def directions(keys: np.ndarray) -> np.ndarray:
    """keys [..., d] scaled to length 1, float64; a zero key stays zero."""
    keys = keys.astype(np.float64)
    norm = np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.divide(keys, norm, out=np.zeros_like(keys), where=norm > 0)


def redundancy(mean: np.ndarray, n_tokens: int) -> float:
    """Mean cosine similarity of two different keys (eq. 4), from the mean [d] of the directions of all T keys."""
    if n_tokens == 1:
        return 0.0
    return float(np.clip((n_tokens * (mean @ mean) - 1) / (n_tokens - 1), 0, 1))


def mixed(
    s_ex: np.ndarray, k: np.ndarray, v: np.ndarray, settings: Settings, calibrated: float | None = None
) -> np.ndarray:
    """Scores [n] float64 of the candidates, the first n tokens. s_ex: [n]; k, v: [T, d] of one KV head.

    calibrated: redundancy to mix by, instead of the prompt's own.
    """
    n = len(s_ex)
    norms = np.linalg.norm(v[:n].astype(np.float64), axis=1)
    if settings["value"] == "knorm":
        norms = -np.linalg.norm(k[:n].astype(np.float64), axis=1)
    s_imp = s_ex + scaled_to(minmax01(norms), s_ex.mean())
    unit = directions(k)
    mean = unit.mean(axis=0)
    scale = s_ex if settings["scale"] == "ex" else s_imp
    s_div = scaled_to(minmax01(-(unit[:n] @ mean)), scale.mean())
    r = redundancy(mean, len(k)) if calibrated is None else calibrated
    weight = {"headwise": r, "importance": 0.0, "diversity": 1.0, "even": 0.5}[settings["mode"]]
    return (1 - weight) * s_imp + weight * s_div


def attention(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64: the pooled window attention alone."""
    return pooled_attention(layer, settings["window"], settings["kernel"], settings["pool"])


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """[Hkv, T] float64. The window's own tokens keep their unpooled attention."""
    out = attention(layer, settings)
    before = max(0, layer.k.shape[1] - settings["window"])
    weights: list[float | None] = [None] * len(out)
    if settings["source"] == "profile" and settings["mode"] == "headwise":
        if layer.profile is None:
            raise ProfileError(
                "scorer 'mixkv' needs a profile; make one with `kvedge calibrate heads --kind redundancy`"
            )
        weights = [float(r) for r in layer.profile]
    if before:
        for h, row in enumerate(out):
            row[:before] = mixed(row[:before], layer.k[h], layer.v[h], settings, weights[h])
    return out


SUMMARY = "window attention and value norms, mixed with how different a key is"
SOURCE = "MixKV, section 3.3"
