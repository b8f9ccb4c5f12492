"""Random prompts for compress, as `kvedge methods --check` uses them, and whether both engines do the same with one."""

import math

import numpy as np

import pykvedge
from pykvedge.reference.checks.prompts import LAYOUTS, Prompt, image_mask, profiles_of, projection_of, prompt

__all__ = ["LAYOUTS", "Prompt", "image_mask", "kept_alike", "outputs", "profiles_of", "projection_of", "prompt"]


def kept_alike(atol, plan, p, **options):
    """Both engines keep the same tokens, of scores that agree."""
    ours, definition = (pykvedge.compress(plan, *p.arguments, engine=e, **options) for e in ("native", "numpy"))
    np.testing.assert_allclose(ours.scores, definition.scores, rtol=1e-3, atol=atol)
    for layer, other in zip(ours.kept, definition.kept, strict=True):
        for head, its in zip(layer, other, strict=True):
            np.testing.assert_array_equal(head, its)
    return ours


def outputs(q, k, v, bias=0.0):
    """[n, d]: attention of queries [n, d] over rows k, v [T, d], whose logits have biases."""
    logits = q @ k.T / math.sqrt(q.shape[-1]) + bias
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v
