"""Mixed: the more alike the keys of a head are, the more the score counts diversity instead of attention.

MixKV (Liu et al. 2025, arXiv:2510.20707), section 3.3. Importance is the pooled window attention plus the norm of the
value. Diversity is how far a key points away from the mean direction of all keys. Both are scaled to one range. A head
mixes the two by its redundancy r, the mean cosine similarity of two different keys (eq. 4). The paper takes r from the
prompt, the released code from a table averaged over samples (table 4 has both). `source = profile` reads such a table
from a profile of `kvedge calibrate heads --kind redundancy`. Only tokens before the window are mixed. The window is
kept, up to half of the budget (`parts` = 4: a quarter; the paper's smallest budget is two windows). In a longer window,
the older tokens compete by their attention.

Where the paper is silent: a range of zero scales to 0, a key of norm zero has no direction, and 0 <= r <= 1.
"""

from __future__ import annotations

import numpy as np

from pykvedge.errors import ProfileError
from pykvedge.reference.stages.base import Layer, Settings
from pykvedge.reference.stages.window import pooled_attention

EPS = 1e-8
SAME = 1e-6  # a range below this part of the largest value is rounding, so the values count as equal


def minmax01(x: np.ndarray) -> np.ndarray:
    """Returns x [n] moved and scaled to [0, 1]; all 0 if x is constant except for rounding."""
    span = x.max() - x.min()
    return (x - x.min()) / (span + EPS) if span > SAME * np.abs(x).max() else np.zeros(len(x))


def scaled_to(x: np.ndarray, mean: float) -> np.ndarray:
    """Returns x [n], whose values lie in [0, 1], scaled to the mean `mean`."""
    return x * mean / (x.mean() + EPS)


def directions(keys: np.ndarray) -> np.ndarray:
    """Returns keys [..., d] scaled to length 1, float64; a zero key stays zero."""
    keys = keys.astype(np.float64)
    norm = np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.divide(keys, norm, out=np.zeros_like(keys), where=norm > 0)


def redundancy(mean: np.ndarray, n_tokens: int) -> float:
    """Returns the mean cosine similarity of two different keys (eq. 4). mean: [d], of the directions of all T keys."""
    if n_tokens == 1:
        return 0.0
    return float(np.clip((n_tokens * (mean @ mean) - 1) / (n_tokens - 1), 0, 1))


def mixed(
    s_ex: np.ndarray, k: np.ndarray, v: np.ndarray, settings: Settings, calibrated: float | None = None
) -> np.ndarray:
    """Returns scores [n] float64 of the candidates, the first n tokens. s_ex: [n]; k, v: [T, d] of one KV head.

    calibrated: a redundancy that replaces the prompt's redundancy.
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
    """Returns [Hkv, T] float64: the pooled window attention alone."""
    return pooled_attention(layer, settings["window"], settings["kernel"], settings["pool"])


def score(layer: Layer, settings: Settings) -> np.ndarray:
    """Returns [Hkv, T] float64. Tokens inside the window keep their unpooled attention."""
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


SUMMARY = "window attention and value norms, mixed with the difference of a key from other keys"
SOURCE = "MixKV, section 3.3"
