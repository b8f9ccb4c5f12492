"""Computes the number and the places of an image's tokens from the metadata of an mmproj and the image's size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pykvedge.errors import UnsupportedError, UsageError
from pykvedge.models.gguf import Header
from pykvedge.models.modelfile import projector

_FIXED = {"mlp": 1, "ldp": 2, "ldpv2": 2, "gemma3": 4}  # projector -> patches per side that become one token
_SQUARE = (*_FIXED, "adapter", "gemma3nv", "janus_pro")  # projectors that centre every image on one square
# projectors that resize an image as Qwen2-VL does, to a size that depends on the image -> the metadata key of the
# number of patches per side that become one token, and its default
_MERGE, _SCALE = "clip.vision.spatial_merge_size", "clip.vision.projector.scale_factor"
_BY_SIZE = {
    "qwen2vl_merger": (_MERGE, 2),
    "qwen2.5vl_merger": (_MERGE, 2),
    "qwen3vl_merger": (_MERGE, 2),
    "glm4v": (_MERGE, 2),
    "pixtral": (_MERGE, 1),
    "kimivl": (_SCALE, 1),
    "gemma4v": (_SCALE, 3),
}
# projector -> mtmd's least and most tokens of an image, which the user may change
_LIMITS = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "ling3vl", "glm4v"), (8, 4096)),
    **dict.fromkeys(("pixtral", "kimivl"), (8, 1024)),
    **dict.fromkeys(("gemma4v", "gemma4uv"), (70, 1120)),
    "minimax_m3": (8, 576),
}
MAX_TOKENS = 1 << 14  # largest limit that the user may ask for: an encoder's work grows with the square of tokens


@dataclass(frozen=True)
class ImageGrid:
    """The size of an encoder's output for one image. The encoder may cut the image into parts."""

    tokens: tuple[int, ...]  # tokens of each part
    n_patches: int  # patches of one part
    pixels: int  # pixels of one part

    @property
    def n_tokens(self) -> int:
        """The tokens of all parts together."""
        return sum(self.tokens)

    @property
    def parts(self) -> int:
        return len(self.tokens)


def token_limits(mmproj: Header, least: int = 0, most: int = 0) -> tuple[int, int] | None:
    """Returns the least and the most tokens that an encoder makes of an image; None: the encoder takes no limits.

    least, most: limits that the user asks for, or 0. A user's limit replaces the encoder's limit; the other limit moves
    if the two would cross. An image with more tokens in one row than `most` exceeds the limit. Raises UsageError if the
    user asks for limits and the encoder takes none.
    """
    kind = projector(mmproj)
    if kind not in _LIMITS:
        if not least and not most:
            return None
        why = "its images have a fixed size" if kind in _SQUARE else f"its projector '{kind}' takes no limits"
        raise UsageError(
            f"--image-min-tokens and --image-max-tokens do not work with {mmproj.path.name}: {why}; "
            "use --image-tokens to read fewer tokens"
        )
    own_least, own_most = _LIMITS[kind]
    most_now = most or max(own_most, least)
    return least or (own_least if own_least <= most_now else 1), most_now


def image_grid(mmproj: Header, width: int, height: int, limits: tuple[int, int] | None = None) -> ImageGrid:
    """Returns tokens, patches and pixels of an image of that size. limits: from token_limits; None: the encoder's.

    Raises UnsupportedError for an encoder whose cuts only mtmd knows (imagecount.py asks mtmd).
    """
    kind, values = projector(mmproj), mmproj.values
    patch, size = int(values.get("clip.vision.patch_size", 0)), int(values.get("clip.vision.image_size", 0))
    if patch > 0 and kind in _FIXED and size >= patch:
        per_side = size // patch
        merge = int(values.get("clip.vision.projector.scale_factor", _FIXED[kind]))
        merge = merge if kind == "gemma3" else _FIXED[kind]
        return ImageGrid(((per_side // merge) ** 2,), per_side**2 + 1, size * size)
    if patch > 0 and kind in _BY_SIZE:
        side = patch * int(values.get(*_BY_SIZE[kind]))
        least, most = limits or _LIMITS[kind]
        w, h = _aligned(width, height, side, least * side * side, most * side * side)
        breaks = h // side - 1 if kind == "pixtral" else 0  # a token after each row except the last
        return ImageGrid(((w // side) * (h // side) + breaks,), (w // patch) * (h // patch), w * h)
    raise UnsupportedError(
        f"{mmproj.path}: the number of tokens of an image with projector '{kind}' is unknown; give --encoder-tokens"
    )


def seen_at_most(mmproj: Header, limits: tuple[int, int] | None) -> tuple[int, int]:
    """Returns the most pixels of an image that an encoder sees, and the longest side; zeros if only mtmd knows them.

    limits: from token_limits.
    """
    kind, values = projector(mmproj), mmproj.values
    size = int(values.get("clip.vision.image_size", 0))
    if kind in _SQUARE and size > 0:
        return size * size, size
    if kind in _BY_SIZE:
        side = int(values.get("clip.vision.patch_size", 0)) * int(values.get(*_BY_SIZE[kind]))
        pixels = (limits or _LIMITS[kind])[1] * side * side
        return pixels, max(pixels // max(side, 1), 1)
    return 0, 0


@dataclass(frozen=True)
class Places:
    """The grid of an image's tokens, row by row. padded: the image is centred on the grid; else it fills the grid."""

    across: int
    down: int
    padded: bool


def places(kind: str, reported: tuple[int, int], n_tokens: int) -> Places | None:
    """Returns the grid of an image's tokens, or None if it is unknown.

    kind: the projector. reported: columns and rows from mtmd, which reports one row for images of a fixed size.
    """
    columns, rows = reported
    if rows > 1 and columns * rows == n_tokens:
        return Places(columns, rows, padded=False)
    side = math.isqrt(n_tokens)
    return Places(side, side, padded=True) if kind in _SQUARE and side * side == n_tokens else None


def _aligned(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Resizes as Qwen2-VL does: multiples of `side`, about the same ratio, least <= pixels <= most.

    Computes in float32 as mtmd does. In double precision, sizes that divide exactly come out one step smaller.
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
