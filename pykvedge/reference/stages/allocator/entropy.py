"""Entropy: the wider text and images look at each other in a layer, the more pairs it keeps.

MEDA (Wan et al. 2025, arXiv:2502.17599), cross-modal attention entropy: A_TV is what the text's queries pay to the
visual keys alone, all of them whatever their order, A_VT the other way round. A layer's entropy is the mean over its
heads of that of A_TV per text token plus that of A_VT per visual token, and its share of the budget the softmax over
the layers, between 1 % and all of the prompt. The released code takes the whole causal attention map instead:
`attention` set to full, which is also what a prompt of text alone, or of images alone, has.

The queries wait for the end of the prompt in half precision. The shares do not add up to the budget once they are
limited; here the other layers take the difference in proportion, and the largest remainder meets the total.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import causal_attention, softmax
from pykvedge.reference.stages.base import Layer, Prompt, Settings
from pykvedge.reference.stages.shares import round_shares

LEAST, SMALLEST = 0.01, 1e-12  # of a share; of a weight, before its logarithm


def entropy(weights: np.ndarray) -> float:
    """Sum of -A ln A over all entries."""
    weights = np.maximum(weights, SMALLEST)
    return float(-(weights * np.log(weights)).sum())


def cross_attention(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) without a mask. q [m, d], k [n, d] -> [m, n] float64."""
    return softmax((q.astype(np.float64) @ k.astype(np.float64).T) / np.sqrt(k.shape[1]))


def cross_modal_entropy(layer: Layer) -> float:
    """E of one layer; its prompt has text and image tokens."""
    group = len(layer.q) // len(layer.k)
    image, text = layer.image_mask, ~layer.image_mask
    with np.errstate(over="ignore"):
        queries = layer.q.astype(np.float16)
    out = 0.0
    for h, q in enumerate(queries):
        k = layer.k[h // group]
        out += entropy(cross_attention(q[text], k[image])) / text.sum()
        out += entropy(cross_attention(q[image], k[text])) / image.sum()
    return out / len(queries)


def full_entropy(layer: Layer) -> float:
    """Entropy of the causal attention, mean over heads and queries."""
    group = len(layer.q) // len(layer.k)
    return (
        float(np.mean([entropy(causal_attention(q, layer.k[h // group])) for h, q in enumerate(layer.q)]))
        / (layer.k.shape[1])
    )


def layer_shares(entropies: np.ndarray, budget: float) -> np.ndarray:
    """Shares of the prompt [L], before they are made to add up: softmax of entropies [L], L * budget together."""
    weights = np.exp(entropies - entropies.max())
    return np.clip(weights / weights.sum() * len(entropies) * budget, LEAST, 1)


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """[L, Hkv] int64, equal within a layer; the layers' sum is L times the even budget."""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    mixed = bool(prompt.image_mask.any()) and not bool(prompt.image_mask.all())
    of_layer = cross_modal_entropy if mixed and settings["attention"] == "cross" else full_entropy
    with np.errstate(invalid="ignore"):
        entropies = np.array([of_layer(layer) for layer in prompt.layers])
    if not np.isfinite(entropies).all():  # queries beyond half precision say nothing
        entropies = np.zeros(n_layers)
    shares = layer_shares(entropies, prompt.budget / n_tokens)
    counts = round_shares(shares, prompt.budget * n_layers, n_tokens, least=max(1, prompt.fixed_recent))
    return np.repeat(counts[:, None], n_heads_kv, axis=1)


SUMMARY = "more for the layers in which text and images look at each other more widely"
SOURCE = "MEDA"
