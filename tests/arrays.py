"""Random prompts for compress (those of `kvedge methods --check`), and a check that both engines agree on a prompt."""

import math

import numpy as np

import pykvedge
from pykvedge.reference.checks.prompts import LAYOUTS, Prompt, image_mask, profiles_of, projection_of, prompt
from pykvedge.reference.stages import base

__all__ = ["LAYOUTS", "Prompt", "image_mask", "profiles_of", "projection_of", "prompt"]  # imported names

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}  # query heads and KV heads of a layer


def check_engines_agree(atol, plan, p, **options):
    """Checks that both engines keep the same tokens, with scores equal within atol. Returns the native result."""
    ours, definition = (pykvedge.compress(plan, *p.arguments, engine=e, **options) for e in ("native", "numpy"))
    np.testing.assert_allclose(ours.scores, definition.scores, rtol=1e-3, atol=atol)
    for layer, other in zip(ours.kept, definition.kept, strict=True):
        for head, its in zip(layer, other, strict=True):
            np.testing.assert_array_equal(head, its)
    return ours


def layer_of(p, i=0):
    """Returns the input of a scorer for layer i of the prompt p."""
    return base.Layer(p.q[i], p.k[i], p.v[i], p.image_mask, i)


def prompt_of(p, budget, recent=0, scores=None, **more):
    """Returns the input of an allocator for the prompt p. Default scores: 0."""
    n_layers, n_heads_kv, n_tokens, _ = p.k.shape
    scores = np.zeros((n_layers, n_heads_kv, n_tokens)) if scores is None else scores
    layers = tuple(layer_of(p, i) for i in range(n_layers))
    return base.Prompt(scores, p.image_mask, budget, recent, layers, **more)


def defined(plan, p):
    """Returns the result of the NumPy engine (the definition) for the prompt p, with f32 rows."""
    return pykvedge.compress(plan, *p.arguments, engine="numpy", kv_type="f32")


def outputs(q, k, v, bias=0.0):
    """Returns [n, d]: the attention of queries q [n, d] over the rows k, v [T, d]. bias is added to the logits."""
    logits = q @ k.T / math.sqrt(q.shape[-1]) + bias
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v
