"""Glyphs of the pages: characters of DejaVu's and Pillow's fonts as masks of one cell."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pykvedge.errors import UsageError

CELL = 16
BASELINE = 12
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold",
         "Pillow")  # fmt: skip
SIZES = (12, 13, 14, 15)


@functools.cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Raises UsageError where the fonts are not installed: other fonts would be other pages."""
    if name == "Pillow":
        return ImageFont.load_default(size)
    for place in (name + ".ttf", _of_matplotlib(name)):
        try:
            return ImageFont.truetype(place, size)
        except OSError:
            continue
    raise UsageError("pages are drawn with the DejaVu fonts: apt install fonts-dejavu, or pip install matplotlib")


def _of_matplotlib(name: str) -> str:
    try:
        import matplotlib
    except ImportError:
        return ""
    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf")


@functools.cache
def glyph(font: str, size: int, char: str, dx: int, dy: int) -> np.ndarray:
    """Returns the character as float32 [CELL, CELL] in 0..1, `dx` and `dy` pixels off the middle of the cell."""
    image = Image.new("L", (CELL, CELL))
    ImageDraw.Draw(image).text((CELL // 2 + dx, BASELINE + dy), char, 255, _font(font, size), anchor="ms")
    return np.asarray(image, np.float32) / 255
