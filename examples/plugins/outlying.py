"""Keeps what stands out: the tokens whose keys lie farthest from the mean key of their head.

kvedge chat --plugin examples/plugins/outlying.py --method outlying --image examples/scene-1.png "What is this?"
"""

import numpy as np

import pykvedge


@pykvedge.scorer("outlying")
def outlying(layer, settings):
    """keys far from the mean key of their head"""
    return np.linalg.norm(layer.k - layer.k.mean(axis=1, keepdims=True), axis=-1)
