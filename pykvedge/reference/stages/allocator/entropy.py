"""Entropy: a layer keeps more pairs if the attention between its text and images is spread more widely.

MEDA (Wan et al. 2025, arXiv:2502.17599), cross-modal attention entropy. A_TV is the attention of text queries to visual
keys alone, without a causal mask; A_VT is the attention of visual queries to text keys. A layer's entropy is the mean
over heads of the entropy of A_TV per text token plus the entropy of A_VT per visual token. The layer's share of the
budget is the softmax over layers, between 1 % and all of the prompt. The released code uses the whole causal attention
matrix instead: `attention` = full. A prompt of text alone, or of images alone, always uses the whole matrix.

The queries are stored in half precision until the end of the prompt. After the limits the shares no longer add up to
the budget; here the other layers take the difference in proportion, and the largest remainder meets the total.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.attention import causal_attention, softmax
from pykvedge.reference.stages.base import Layer, Prompt, Settings
from pykvedge.reference.stages.shares import round_shares

LEAST, SMALLEST = 0.01, 1e-12  # least share of the prompt; least weight before the logarithm


def entropy(weights: np.ndarray) -> float:
    """Returns the sum of -A ln A over all entries."""
    weights = np.maximum(weights, SMALLEST)
    return float(-(weights * np.log(weights)).sum())


def cross_attention(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns softmax(q k^T / sqrt(d)) without a mask. q [m, d], k [n, d] -> [m, n] float64."""
    return softmax((q.astype(np.float64) @ k.astype(np.float64).T) / np.sqrt(k.shape[1]))


def cross_modal_entropy(layer: Layer) -> float:
    """Returns the cross-modal entropy of one layer. The prompt must have text and image tokens."""
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
    """Returns the entropy of the causal attention, averaged over heads and queries."""
    group = len(layer.q) // len(layer.k)
    return (
        float(np.mean([entropy(causal_attention(q, layer.k[h // group])) for h, q in enumerate(layer.q)]))
        / (layer.k.shape[1])
    )


def layer_shares(entropies: np.ndarray, budget: float) -> np.ndarray:
    """Returns layers' shares [L] of the prompt: the softmax of entropies [L], scaled to the sum L * budget, limited."""
    weights = np.exp(entropies - entropies.max())
    return np.clip(weights / weights.sum() * len(entropies) * budget, LEAST, 1)


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64, equal within a layer; the sum over layers is L times the even budget."""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    mixed = bool(prompt.image_mask.any()) and not bool(prompt.image_mask.all())
    of_layer = cross_modal_entropy if mixed and settings["attention"] == "cross" else full_entropy
    with np.errstate(invalid="ignore"):
        entropies = np.array([of_layer(layer) for layer in prompt.layers])
    if not np.isfinite(entropies).all():  # an overflow of half precision: all layers count as equal
        entropies = np.zeros(n_layers)
    shares = layer_shares(entropies, prompt.budget / n_tokens)
    counts = round_shares(shares, prompt.budget * n_layers, n_tokens, least=max(1, prompt.fixed_recent))
    return np.repeat(counts[:, None], n_heads_kv, axis=1)


SUMMARY = "more for layers with wider attention between text and images"
SOURCE = "MEDA"
