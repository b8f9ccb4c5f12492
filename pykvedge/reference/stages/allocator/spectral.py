"""Spectral: the more of a layer's keys and values lies in high frequencies, the more pairs it keeps.

FlashCache (Yang et al. 2025, arXiv:2511.16786), section 3.2, "dynamic budget allocation": the share of a layer goes by
R = high / all energy of its keys plus the same of its values. Eq. 12 sums from the bin after the cut-off, eq. 8 keeps
the bins before it; here the bin at the cut-off counts as high. Where the paper is silent: a layer keeps at most all
pairs and at least one and the protected last ones, the others share the difference in proportion, and without any
high frequency the layers get the same.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import round_shares
from pykvedge.reference.stages.spectrum import high_share


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """[L, Hkv] int64, equal within a layer; the layers' sum is L times the even budget."""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    gamma = settings["gamma"]
    ratio = np.array([high_share(layer.k, gamma) + high_share(layer.v, gamma) for layer in prompt.layers])
    counts = round_shares(ratio, prompt.budget * n_layers, n_tokens, least=max(1, prompt.recent))
    return np.repeat(counts[:, None], n_heads_kv, axis=1)


SUMMARY = "more for the layers whose keys and values change fast along the tokens"
SOURCE = "FlashCache, section 3.2"
