"""Draws sheets with text, tables and charts, for models that read documents. A seed makes them repeatable.

The pages of page_tasks are not used here: a model of kvedge was trained on them, and they have answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 448  # pixels; small enough for encoders with one tile
_FONTS = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf", "Arial.ttf")
_NOUNS = ("invoice", "harbour", "garden", "engine", "letter", "bridge", "market", "winter", "museum", "ticket",
          "river", "copper", "library", "island", "concert", "village")  # fmt: skip
_VERBS = ("opens", "closes", "arrives", "starts", "moves", "returns", "ends", "changes")
_NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jana", "Karim", "Lena")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_INKS = ((20, 20, 30), (30, 60, 140), (140, 40, 30), (20, 100, 60))


def draw(path: Path, seed: int, number: int) -> None:
    """Draws page `number` of a seed into a PNG file: text, a table or a chart in turn. Raises OSError."""
    rng = np.random.default_rng((seed, number))
    page = Image.new("RGB", (SIDE, SIDE), tuple(int(x) for x in rng.integers(235, 256, 3)))
    pen = ImageDraw.Draw(page)
    ink = _INKS[int(rng.integers(len(_INKS)))]
    title = f"{_pick(rng, _NOUNS).capitalize()} {_pick(rng, _NOUNS)} {rng.integers(100, 1000)}"
    pen.text((24, 18), title, ink, _font(rng, 30))
    (_text, _table, _chart)[number % 3](pen, rng, ink)
    page.save(path, format="PNG")


def _text(pen: ImageDraw.ImageDraw, rng: np.random.Generator, ink: tuple[int, int, int]) -> None:
    font = _font(rng, 20)
    for i in range(int(rng.integers(5, 10))):
        line = f"The {_pick(rng, _NOUNS)} {_pick(rng, _VERBS)} on {rng.integers(1, 29)} {_pick(rng, _MONTHS)}."
        pen.text((24, 74 + 36 * i), line, ink, font)


def _table(pen: ImageDraw.ImageDraw, rng: np.random.Generator, ink: tuple[int, int, int]) -> None:
    font, rows = _font(rng, 19), [("name", "city", "sum")]
    for name in rng.permutation(_NAMES)[: int(rng.integers(4, 8))]:
        rows.append((str(name), _pick(rng, _NOUNS), f"{rng.integers(10, 10000) / 10:.1f}"))
    for i, row in enumerate(rows):
        for column, cell in enumerate(row):
            pen.text((30 + 135 * column, 82 + 40 * i), cell, ink, font)
        pen.line((24, 116 + 40 * i, SIDE - 24, 116 + 40 * i), ink, 2 if i == 0 else 1)


def _chart(pen: ImageDraw.ImageDraw, rng: np.random.Generator, ink: tuple[int, int, int]) -> None:
    font, first = _font(rng, 16), int(rng.integers(7))
    for i in range(6):
        value, left = int(rng.integers(5, 100)), 40 + 64 * i
        top = SIDE - 60 - value * 270 // 100
        pen.rectangle((left, top, left + 40, SIDE - 60), _INKS[i % len(_INKS)])
        pen.text((left + 8, top - 22), str(value), ink, font)
        pen.text((left + 4, SIDE - 50), _MONTHS[first + i - 6 if first + i > 11 else first + i], ink, font)
    pen.line((30, SIDE - 60, SIDE - 20, SIDE - 60), ink, 2)


def _pick(rng: np.random.Generator, of: Sequence[str]) -> str:
    return of[int(rng.integers(len(of)))]


def _font(rng: np.random.Generator, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns one of the system's fonts, or Pillow's default font."""
    try:
        return ImageFont.truetype(_pick(rng, _FONTS), size)
    except OSError:
        return ImageFont.load_default(size)
