"""Spectral: a layer keeps more pairs if more energy of its keys and values is in high frequencies.

FlashCache (Yang et al. 2025, arXiv:2511.16786), section 3.2, "dynamic budget allocation": a layer's share is
proportional to R = high / all energy of its keys plus high / all energy of its values. Eq. 12 sums from the bin after
the cut-off, eq. 8 keeps the bins before the cut-off; here the bin at the cut-off counts as high. Where the paper is
silent: a layer keeps at most all pairs, and at least one pair and the protected last pairs; other layers share the
difference in proportion; without any high frequency all layers keep the same number.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import round_shares
from pykvedge.reference.stages.spectrum import high_share


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64, equal within a layer; the sum over layers is L times the even budget."""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    gamma = settings["gamma"]
    ratio = np.array([high_share(layer.k, gamma) + high_share(layer.v, gamma) for layer in prompt.layers])
    counts = round_shares(ratio, prompt.budget * n_layers, n_tokens, least=max(1, prompt.recent))
    return np.repeat(counts[:, None], n_heads_kv, axis=1)


SUMMARY = "more for layers whose keys and values change fast along the tokens"
SOURCE = "FlashCache, section 3.2"
