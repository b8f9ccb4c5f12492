"""Pages of the second demo model. A page is data (`Page`); `render` turns it into pixels.

A page is a grid of cells of 16 x 16 pixels, each as large as a token of the model, with at most one character per cell,
in DejaVu's fonts or Pillow's. A page has one kind of rows (numbered lines, a table, or a bar chart), and a code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kvedge_lab.demo_tasks.font import CODE_CHARS
from kvedge_lab.demo_tasks.scenes import draw_code
from pykvedge.errors import UsageError

CELL = 16
BASELINE = 12
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold",
         "Pillow")  # fmt: skip
SIZES = (12, 13, 14, 15)
COLUMNS = 24
KINDS = ("text", "table", "chart")
MAX_PAGES = 8
MAX_ROWS = 8
CODE_WORD, HEADER = "code", ("item", "price", "left")
ITEMS = ("apples", "pears", "plums", "figs", "grapes", "lemons", "limes", "melons", "onions", "beans", "peas", "leeks",
         "carrots", "beets", "nuts", "dates", "eggs", "rolls", "cakes", "pies", "cups", "mugs", "pens", "books",
         "lamps", "chairs", "tables", "hats", "shoes", "socks", "ropes", "nails")  # fmt: skip
WORDS = ("old", "new", "big", "small", "dark", "light", "cold", "warm", "quiet", "loud", "river", "stone", "tree",
         "house", "road", "hill", "lake", "bird", "horse", "dog", "cat", "man", "woman", "child", "king", "ship",
         "train", "clock", "door", "wall", "fire", "snow", "rain", "wind", "night", "day", "sings", "sleeps", "runs",
         "falls", "waits", "burns", "turns", "stands", "green", "round", "under", "near")  # fmt: skip
COLOURS = {"red": (210, 40, 45), "green": (45, 150, 65), "blue": (45, 80, 210), "yellow": (225, 195, 30),
           "purple": (130, 55, 170), "orange": (240, 130, 30)}  # fmt: skip
LEXICON = (CODE_WORD, *HEADER, *ITEMS, *WORDS)
CHARS = "abcdefghijklmnopqrstuvwxyz0123456789." + "".join(c for c in CODE_CHARS if c.isalpha())
Place = tuple[int, int]  # row and column of a cell


@dataclass(frozen=True)
class Text:
    """Characters in a row of cells. `slot`: their role on the page."""

    slot: str
    text: str
    row: int
    column: int

    def cells(self) -> list[Place]:
        return [(self.row, self.column + k) for k in range(len(self.text))]


@dataclass(frozen=True)
class Bar:
    row: int
    column: int
    length: int
    colour: str


@dataclass(frozen=True)
class Row:
    """A row of a page. `key`: a line's number, or an item. `parts`: all texts of the row, with the key."""

    key: Text
    parts: tuple[Text, ...]
    bar: Bar | None = None

    def part(self, slot: str) -> Text:
        return next(part for part in self.parts if part.slot == slot)


@dataclass(frozen=True)
class Look:
    """The appearance of a page."""

    font: str
    size: int
    dx: int
    dy: int
    ink: tuple[int, int, int]
    paper: tuple[int, int, int]
    ruled: bool
    bar_height: int


@dataclass(frozen=True)
class Page:
    kind: str
    rows: tuple[Row, ...]
    code: Text
    others: tuple[Text, ...]  # the word before the code, and the head of a table
    height: int  # in cells
    look: Look

    def texts(self) -> list[Text]:
        return [*(part for row in self.rows for part in row.parts), *self.others, self.code]


def _text_row(rng: np.random.Generator, number: int, at: int) -> Row:
    key = Text("number", str(number), at, 1)
    parts, column = [key], 3
    for k, word in enumerate(rng.choice(WORDS, 3, replace=False)):
        parts.append(Text(f"word {k + 1}", str(word), at, column))
        column += len(word) + 1
    return Row(key, tuple(parts))


def _table_row(rng: np.random.Generator, item: str, at: int, columns: Place) -> Row:
    key = Text("label", item, at, 1)
    price = f"{rng.integers(1, 10)}.{rng.integers(0, 10)}{rng.integers(0, 10)}"
    left = str(rng.integers(10, 100))
    return Row(key, (key, Text("price", price, at, columns[0]), Text("left", left, at, columns[1])))


def draw_page(rng: np.random.Generator, held_out: bool = False, kind: str = "") -> Page:
    """Draws a page of the training side or the held-out side. The code alone decides the side. kind: "": any."""
    kind = kind or KINDS[int(rng.integers(0, len(KINDS)))]
    count = int(rng.integers(4, MAX_ROWS + 1))
    items = [str(i) for i in rng.choice(ITEMS, count, replace=False)]
    lines = list(range(1, 2 * (count + 1 + (kind == "table")) + 1, 2))
    others: list[Text] = []
    columns = (int(rng.integers(9, 12)), int(rng.integers(17, 20)))
    if kind == "table":
        head = lines.pop(0)
        others += [Text("head", word, head, c) for word, c in zip(HEADER, (1, *columns), strict=True)]
    at_code = lines.pop(int(rng.integers(0, len(lines))))
    code = Text("code", draw_code(rng, held_out), at_code, 6)
    others.append(Text("code word", CODE_WORD, at_code, 1))
    if kind == "text":
        rows = [_text_row(rng, n + 1, at) for n, at in enumerate(lines)]
    elif kind == "table":
        rows = [_table_row(rng, item, at, columns) for item, at in zip(items, lines, strict=True)]
    else:
        rows = _chart_rows(rng, items, lines)
    return Page(kind, tuple(rows), code, tuple(others), 2 * (count + 1 + (kind == "table")) + 1, _draw_look(rng))


def _chart_rows(rng: np.random.Generator, items: list[str], lines: list[int]) -> list[Row]:
    """Draws bars of 1 to 14 cells. One bar is at least two cells longer than the others."""
    longest = int(rng.integers(5, 15))
    lengths = [int(n) for n in rng.integers(1, longest - 1, len(items))]
    lengths[int(rng.integers(0, len(items)))] = longest
    rows = []
    for item, at, length in zip(items, lines, lengths, strict=True):
        key = Text("label", item, at, 1)
        rows.append(Row(key, (key,), Bar(at, 9, length, str(rng.choice(list(COLOURS))))))
    return rows


def _draw_look(rng: np.random.Generator) -> Look:
    dx, dy = (int(v) for v in rng.integers(-1, 2, 2))
    ink = tuple(int(v) for v in rng.integers(0, 80, 3))
    paper = tuple(int(v) for v in rng.integers(228, 256, 3))
    font, size = FONTS[int(rng.integers(0, len(FONTS)))], SIZES[int(rng.integers(0, len(SIZES)))]
    return Look(font, size, dx, dy, ink, paper, bool(rng.integers(0, 2)), int(rng.integers(8, 15)))  # type: ignore[arg-type]


@functools.cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns a font. Raises UsageError if it is not installed, because other fonts would give other pages."""
    if name == "Pillow":
        return ImageFont.load_default(size)
    for place in (name + ".ttf", _of_matplotlib(name)):
        try:
            return ImageFont.truetype(place, size)
        except OSError:
            continue
    raise UsageError("drawing pages needs the DejaVu fonts: apt install fonts-dejavu, or pip install matplotlib")


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


def render(page: Page) -> np.ndarray:
    """Returns the picture, uint8 [height, width, 3]."""
    look = page.look
    image = np.empty((page.height * CELL, COLUMNS * CELL, 3), np.float32)
    image[...] = look.paper
    if page.kind == "table" and look.ruled:
        image[CELL // 2 :: 2 * CELL, CELL // 2 : -CELL // 2] = 150
    for row in page.rows:
        if row.bar:
            top, left = row.bar.row * CELL + (CELL - look.bar_height) // 2, row.bar.column * CELL
            image[top : top + look.bar_height, left : left + row.bar.length * CELL] = COLOURS[row.bar.colour]
    if page.kind == "chart":
        image[CELL // 2 : -CELL // 2, 9 * CELL - 2 : 9 * CELL] = look.ink
    ink = np.array(look.ink, np.float32)
    for text in page.texts():
        for char, (r, c) in zip(text.text, text.cells(), strict=True):
            cell = image[r * CELL : (r + 1) * CELL, c * CELL : (c + 1) * CELL]
            cell += (ink - cell) * glyph(look.font, look.size, char, look.dx, look.dy)[..., None]
    return np.rint(image).astype(np.uint8)
