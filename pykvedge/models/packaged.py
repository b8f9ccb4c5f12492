"""The packaged model, which knows drawn scenes only: small objects on a large plain square."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pykvedge.errors import one_line
from pykvedge.models.images import Picture
from pykvedge.system.files import DATA

PACKAGED = DATA / "demo-model.gguf"  # the model if the user names none
BLIND = (
    "the packaged model knows drawn scenes only, and this question has no picture; give one, or use another model with "
    "-m or -hf"
)
_PLAIN = 0.8  # least share of pixels with the background's colour; objects and a code take a tenth
_NOISE = 16  # largest change of a plain colour by JPEG
_PIXELS = 1 << 13  # number of pixels that is_scene() reads


def is_scene(picture: Picture) -> bool:
    """Returns whether a picture may be a drawn scene: square, and nearly all of one colour."""
    if abs(picture.width - picture.height) > max(picture.width, picture.height) / 20:
        return False
    pixels = np.frombuffer(picture.pixels(), np.uint8).reshape(-1, 3)
    pixels = pixels[:: max(1, len(pixels) // _PIXELS)].astype(np.int16)
    background = np.median(pixels, axis=0)
    return bool(np.mean(np.abs(pixels - background).max(axis=1) <= _NOISE) >= _PLAIN)


def hints(model: Path, pictures: Iterable[Picture | object], seeing: bool = True) -> list[str]:
    """Returns a line about what the packaged model does not know; [] for other models.

    This is the first picture that is no drawn scene, or a conversation without pictures (not seeing).
    """
    if model != PACKAGED:
        return []
    if not seeing:
        return [BLIND]
    for picture in pictures:
        if isinstance(picture, Picture) and not is_scene(picture):
            name = one_line(picture.name)
            return [
                f"the packaged model knows drawn scenes only, and {name} is not a drawn scene; use another model "
                f"with -m or -hf"
            ]
    return []
