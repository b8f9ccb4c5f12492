"""Scenes of the demo model: a few small objects and one printed code on a large plain background.

A scene is data (`Scene`); `render` turns it into pixels. The picture is a grid of 12 x 12 cells of 20 px, each as large
as a patch of the vision tower. An object or character stays inside one cell, at a random size and offset.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, field

import numpy as np

from .font import CODE_CHARS, GLYPH_H, GLYPH_W, glyph

GRID, CELL = 12, 20
IMAGE_SIZE = GRID * CELL
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "heart", "ring")
PLURALS = {s: ("crosses" if s == "cross" else s + "s") for s in SHAPES}
COLOURS = {
    "red": (215, 35, 40),
    "green": (40, 150, 60),
    "blue": (40, 75, 215),
    "yellow": (230, 200, 20),
    "purple": (130, 50, 175),
    "orange": (240, 125, 25),
    "black": (25, 25, 25),
    "pink": (245, 120, 185),
}
ROW_NAMES, COLUMN_NAMES = ("top", "middle", "bottom"), ("left", "centre", "right")
MAX_OBJECTS, MAX_COUNT = 6, 5
_BACKGROUNDS = ((250, 250, 248), (225, 228, 232), (246, 238, 220), (222, 236, 246), (226, 242, 226), (243, 228, 240))
_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Item:
    """One object: its kind, its cell, and its size and offset in pixels inside the cell."""

    shape: str
    colour: str
    row: int
    col: int
    size: int = 14
    dy: int = 3
    dx: int = 3
    tint: int = 0

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        return place(self.row, self.col)


@dataclass(frozen=True)
class Scene:
    """Objects in reading order, one code, and the background."""

    items: tuple[Item, ...]
    code: str
    code_row: int
    code_col: int
    code_offset: tuple[int, int] = (3, 5)
    background: tuple[int, int, int] = field(default=_BACKGROUNDS[0])

    @property
    def held_out(self) -> bool:
        return code_is_held_out(self.code)

    def where(self, shape: str | None = None, colour: str | None = None) -> list[Item]:
        """Returns the objects of a shape and colour (None: any)."""
        return [i for i in self.items if shape in (None, i.shape) and colour in (None, i.colour)]


def place(row: int, col: int) -> str:
    """Returns the name of a cell's region: one of 3 x 3."""
    return f"{ROW_NAMES[row * 3 // GRID]} {COLUMN_NAMES[col * 3 // GRID]}"


def code_is_held_out(code: str) -> bool:
    """Returns whether a code, and so its scene, is held out. The code alone decides, so no scene is on both sides."""
    return zlib.crc32(code.encode()) % _HELD_OUT_ONE_IN == 0


PARTS = {"search": (0, 1), "validation": (2,), "test": (3,)}  # parts of the held-out side -> quarters of the codes


def part_of(code: str) -> str:
    """Returns the part of the held-out side that a code, and so its scene, belongs to. Parts are disjoint."""
    quarter = zlib.crc32(code.encode()) // _HELD_OUT_ONE_IN % 4
    return next(name for name, quarters in PARTS.items() if quarter in quarters)


def draw_code(rng: np.random.Generator, held_out: bool) -> str:
    while True:
        chars = rng.integers(0, len(CODE_CHARS), rng.integers(4, 7))
        code = "".join(CODE_CHARS[c] for c in chars)
        if code_is_held_out(code) == held_out:
            return code


def _draw_kinds(rng: np.random.Generator) -> list[str]:
    """Draws shapes of objects: a group of 1 to 5 equal shapes (equally likely sizes), and other shapes."""
    order = rng.permutation(len(SHAPES))
    group = int(rng.integers(1, MAX_COUNT + 1))
    rest = int(rng.integers(max(0, 3 - group), max(1, MAX_OBJECTS - group) + 1))
    others = [SHAPES[order[1 + int(rng.integers(0, len(SHAPES) - 1))]] for _ in range(rest)]
    return [SHAPES[order[0]]] * group + others


def draw_scene(rng: np.random.Generator, held_out: bool = False) -> Scene:
    """Draws a random scene of the training side or the held-out side."""
    code = draw_code(rng, held_out)
    code_row = int(rng.integers(0, GRID))
    code_col = int(rng.integers(0, GRID - len(code) + 1))
    taken = np.zeros((GRID + 2, GRID + 2), bool)
    taken[code_row : code_row + 3, code_col : code_col + len(code) + 2] = True
    colours = list(COLOURS)
    items = []
    for shape in _draw_kinds(rng):
        free = np.argwhere(~taken[1:-1, 1:-1])
        row, col = (int(v) for v in free[rng.integers(0, len(free))])
        taken[row : row + 3, col : col + 3] = True
        size = int(rng.integers(12, 18))
        dy, dx = (int(v) for v in rng.integers(1, CELL - size, 2))
        colour = colours[int(rng.integers(0, len(colours)))]
        items.append(Item(shape, colour, row, col, size, dy, dx, int(rng.integers(-12, 13))))
    items.sort(key=lambda i: (i.row, i.col))
    offset = (int(rng.integers(1, CELL - GLYPH_H)), int(rng.integers(2, CELL - GLYPH_W - 1)))
    base = _BACKGROUNDS[int(rng.integers(0, len(_BACKGROUNDS)))]
    background = tuple(int(np.clip(c + rng.integers(-4, 5), 0, 255)) for c in base)
    return Scene(tuple(items), code, code_row, code_col, offset, background)  # type: ignore[arg-type]


def _inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns whether points of the square [-1, 1]^2 (y downwards) lie inside the shape."""
    radius, angle = np.hypot(x, y), np.arctan2(x, -y)
    if shape == "circle":
        return radius <= 1
    if shape == "ring":
        return (radius <= 1) & (radius >= 0.55)
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.88
    if shape == "diamond":
        return abs(x) + abs(y) <= 1
    if shape == "triangle":
        return (y <= 0.85) & (abs(x) <= (y + 1) * 0.55)
    if shape == "cross":
        return (np.minimum(abs(x), abs(y)) <= 0.3) & (np.maximum(abs(x), abs(y)) <= 1)
    if shape == "heart":
        u, v = x * 1.2, -y * 1.2 + 0.1
        return (u * u + v * v - 1) ** 3 - u * u * v**3 <= 0
    turn = abs((angle * 5 / (2 * np.pi) + 0.5) % 1 - 0.5) * 2  # star: 0 on a ray, 1 between two rays
    return radius * (1 + 1.4 * turn) <= 1.05


@functools.cache
def _sprite(shape: str, size: int) -> np.ndarray:
    """Returns the coverage of each pixel, from 6 x 6 samples."""
    step = (np.arange(size * 6) + 0.5) / (size * 3) - 1
    inside = _inside(shape, step[None, :], step[:, None]).astype(np.float32)
    return inside.reshape(size, 6, size, 6).mean((1, 3))


def _blend(image: np.ndarray, top: int, left: int, mask: np.ndarray, colour: np.ndarray) -> None:
    part = image[top : top + mask.shape[0], left : left + mask.shape[1]]
    part[...] = np.rint(part + (colour - part) * mask[..., None]).astype(np.uint8)


def render(scene: Scene) -> np.ndarray:
    """Returns the picture, uint8 [240, 240, 3]."""
    image = np.empty((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    image[...] = scene.background
    for item in scene.items:
        colour = np.clip(np.array(COLOURS[item.colour], np.float32) + item.tint, 0, 255)
        top, left = item.row * CELL + item.dy, item.col * CELL + item.dx
        _blend(image, top, left, _sprite(item.shape, item.size), colour)
    ink = np.array((20, 20, 30), np.float32)
    for k, char in enumerate(scene.code):
        top = scene.code_row * CELL + scene.code_offset[0]
        left = (scene.code_col + k) * CELL + scene.code_offset[1]
        _blend(image, top, left, glyph(char), ink)
    return image
