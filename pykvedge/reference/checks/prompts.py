"""Random prompts: queries, keys, values, and a mask of image tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykvedge.plans.plan import Plan
from pykvedge.plans.profile import Profile

LAYOUTS = ("text", "image", "image_first", "image_last", "image_in_the_middle", "two_images", "scattered")


@dataclass(frozen=True)
class Prompt:
    """q [L, H, T, d], k and v [L, Hkv, T, d] float32, image_mask [T] bool."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    image_mask: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The arrays in the order of compress()."""
        return self.q, self.k, self.v, self.image_mask


def image_mask(layout: str, n_tokens: int, seed: int = 0) -> np.ndarray:
    """Returns [T] bool: true for the image tokens of a layout."""
    index = np.arange(n_tokens) / max(n_tokens, 1)
    masks = {
        "text": index < 0,
        "image": index >= 0,
        "image_first": index < 0.7,
        "image_last": index >= 0.3,
        "image_in_the_middle": (index >= 0.2) & (index < 0.85),
        "two_images": ((index >= 0.1) & (index < 0.4)) | ((index >= 0.5) & (index < 0.9)),
        "scattered": np.random.default_rng(seed).random(n_tokens) < 0.5,
    }
    return masks[layout]


def prompt(
    n_tokens: int,
    heads: tuple[int, int] = (4, 2),
    layers: int = 2,
    size: int = 32,
    layout: str = "two_images",
    seed: int = 0,
) -> Prompt:
    """Makes a prompt. A few keys are large, as in real prompts, so attention is not uniform. heads: query, KV heads."""
    rng = np.random.default_rng([seed, n_tokens, *heads, size])
    n_heads, n_heads_kv = heads
    q = rng.standard_normal((layers, n_heads, n_tokens, size))
    loud = rng.gamma(2.0, 0.5, (layers, n_heads_kv, n_tokens, 1))
    k = rng.standard_normal((layers, n_heads_kv, n_tokens, size)) * loud
    v = rng.standard_normal((layers, n_heads_kv, n_tokens, size))
    q32, k32, v32 = (np.ascontiguousarray(x, dtype=np.float32) for x in (q, k, v))
    return Prompt(q32, k32, v32, image_mask(layout, n_tokens, seed))


def profiles_of(plan: Plan, p: Prompt) -> list[Profile]:
    """Makes calibrated profiles of the prompt's shape, with a few strong heads, for the plan's stages that need one."""
    return [_profile(kind, p) for kind in plan.profile_kinds().values()]


def projection_of(plan: Plan, p: Prompt) -> np.ndarray | None:
    """Makes an output projection of the prompt's shape, [L, H, d, D] float32, if the plan needs one."""
    if not plan.projects:
        return None
    n_layers, n_heads, _, size = p.q.shape
    made = np.random.default_rng([11, n_layers, n_heads, size]).standard_normal((n_layers, n_heads, size, 2 * size + 5))
    return (made * np.sqrt(1 / size)).astype(np.float32)


def _profile(kind: str, p: Prompt) -> Profile:
    n_layers, n_heads = p.q.shape[:2]
    rng = np.random.default_rng([7, n_layers, n_heads])
    if kind == "prefix":
        return Profile(kind, np.sort(rng.random((n_layers, 3)), axis=1), (0.1, 0.25, 0.7))
    if kind == "key-redundancy":
        return Profile(kind, rng.random((n_layers, p.k.shape[1])))
    if kind == "head-budgets":
        shares = rng.gamma(0.3, 1.0, (n_layers, p.k.shape[1])) + 1e-9
        return Profile(kind, shares / shares.sum())
    return Profile(kind, rng.gamma(0.3, 1.0, (n_layers, n_heads)))
