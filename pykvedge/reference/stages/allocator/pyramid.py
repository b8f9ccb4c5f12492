"""Pyramid: lower layers keep more than higher layers, on a straight line.

PyramidKV (Cai et al. 2024, arXiv:2406.02069), section 4.1: every layer keeps the recent tokens. Beside these, the last
layer receives base // beta pairs, and the first layer as much above the mean as the last layer is below the mean. The
released code rounds the step down and exceeds the total (`rounding` = official). Here the line is real-valued, and
rounding meets the total exactly.
"""

from __future__ import annotations

import numpy as np

from pykvedge.reference.stages.base import Prompt, Settings
from pykvedge.reference.stages.shares import round_shares


def allocate(prompt: Prompt, settings: Settings) -> np.ndarray:
    """Returns [L, Hkv] int64, equal within a layer, decreasing with the layer."""
    n_layers, n_heads_kv, n_tokens = prompt.scores.shape
    held = max(prompt.recent, 1)  # every head keeps at least one pair
    base, most = prompt.budget - held, n_tokens - held
    last = base // settings["beta"]
    first = 2 * base - last
    if first > most:
        first, last = most, 2 * base - most
    if n_layers == 1:
        counts = np.array([base])
    elif settings["rounding"] == "official":
        counts = first - np.arange(n_layers) * ((first - last) // (n_layers - 1))
    else:
        counts = round_shares(np.linspace(first, last, n_layers), base * n_layers, most)
    counts = counts + held
    return np.repeat(counts[:, None], n_heads_kv, axis=1)


SUMMARY = "more for the lower layers, on a straight line"
SOURCE = "PyramidKV, section 4.1"
