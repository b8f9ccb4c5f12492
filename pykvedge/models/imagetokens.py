"""How many tokens an image becomes, from the metadata of an mmproj and the size of the image, and what each shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pykvedge.errors import UnsupportedError
from pykvedge.models.gguf import Header
from pykvedge.models.modelfile import projector

_FIXED = {"mlp": 1, "ldp": 2, "ldpv2": 2, "gemma3": 4}  # projector -> patches that become one token, along each side
_SQUARE = (*_FIXED, "adapter", "gemma3nv", "janus_pro")  # those that see every image centred on one square
_BY_SIZE = ("qwen2vl_merger", "qwen2.5vl_merger")
_LEAST, _MOST = 8, 4096  # tokens of an image of those, unless the file says otherwise


@dataclass(frozen=True)
class ImageGrid:
    """What an encoder makes of one image."""

    n_tokens: int
    n_patches: int
    pixels: int


def image_grid(mmproj: Header, width: int, height: int) -> ImageGrid:
    """Raises UnsupportedError for an encoder whose images are cut in a way that is not known here."""
    kind, values = projector(mmproj), mmproj.values
    patch, size = int(values.get("clip.vision.patch_size", 0)), int(values.get("clip.vision.image_size", 0))
    if patch > 0 and kind in _FIXED and size >= patch:
        per_side = size // patch
        merge = int(values.get("clip.vision.projector.scale_factor", _FIXED[kind]))
        merge = merge if kind == "gemma3" else _FIXED[kind]
        return ImageGrid((per_side // merge) ** 2, per_side**2 + 1, size * size)
    if patch > 0 and kind in _BY_SIZE:
        merge = int(values.get("clip.vision.spatial_merge_size", 2))
        side = patch * merge
        w, h = _aligned(width, height, side, _LEAST * side * side, _MOST * side * side)
        return ImageGrid((w // side) * (h // side), (w // patch) * (h // patch), w * h)
    raise UnsupportedError(
        f"{mmproj.path}: how many tokens its projector '{kind}' makes of an image is not known; give --image-tokens"
    )


@dataclass(frozen=True)
class Places:
    """Where the tokens of an image lie: row by row. padded: the image lies centred on a square, else it fills it."""

    across: int
    down: int
    padded: bool


def places(kind: str, reported: tuple[int, int], n_tokens: int) -> Places | None:
    """What the tokens of an image show, None if that is not known.

    kind: the projector. reported: columns and rows as mtmd tells them, which for models of fixed size is one row.
    """
    columns, rows = reported
    if rows > 1 and columns * rows == n_tokens:
        return Places(columns, rows, padded=False)
    side = math.isqrt(n_tokens)
    return Places(side, side, padded=True) if kind in _SQUARE and side * side == n_tokens else None


def _aligned(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Qwen2-VL's resizing: multiples of `side`, the ratio about kept, least <= pixels <= most.

    In single precision, as mtmd computes it: sizes that divide exactly come out one step smaller in double.
    """
    f = np.float32
    w, h = (max(side, math.floor(f(x) / f(side) + f(0.5)) * side) for x in (width, height))
    if w * h > most:
        shrink = np.sqrt(f(height) * f(width) / f(most))
        w, h = (max(side, math.floor(f(x) / shrink / f(side)) * side) for x in (width, height))
    elif w * h < least:
        grow = np.sqrt(f(least) / (f(height) * f(width)))
        w, h = (math.ceil(f(x) * grow / f(side)) * side for x in (width, height))
    return w, h
