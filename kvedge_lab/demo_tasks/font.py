"""A 5x7 bitmap font for the printed codes: our own, so that every Pillow version draws the same pixels."""

from __future__ import annotations

import functools

import numpy as np

# No 0, 1, I, O, S, B (alike), and no C, D, H, W: they start words of the questions, into which the tokenizer would
# merge them.
_GLYPHS = {
    "2": ".###. #...# ....# ...#. ..#.. .#... #####",
    "3": "##### ...#. ..#.. ...#. ....# #...# .###.",
    "4": "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "5": "##### #.... ####. ....# ....# #...# .###.",
    "6": "..##. .#... #.... ####. #...# #...# .###.",
    "7": "##### ....# ...#. ..#.. .#... .#... .#...",
    "8": ".###. #...# #...# .###. #...# #...# .###.",
    "9": ".###. #...# #...# .#### ....# ...#. .##..",
    "A": "..#.. .#.#. #...# #...# ##### #...# #...#",
    "E": "##### #.... #.... ####. #.... #.... #####",
    "F": "##### #.... #.... ####. #.... #.... #....",
    "K": "#...# #..#. #.#.. ##... #.#.. #..#. #...#",
    "L": "#.... #.... #.... #.... #.... #.... #####",
    "M": "#...# ##.## #.#.# #.#.# #...# #...# #...#",
    "P": "####. #...# #...# ####. #.... #.... #....",
    "R": "####. #...# #...# ####. #.#.. #..#. #...#",
    "T": "##### ..#.. ..#.. ..#.. ..#.. ..#.. ..#..",
    "U": "#...# #...# #...# #...# #...# #...# .###.",
    "X": "#...# #...# .#.#. ..#.. .#.#. #...# #...#",
    "Y": "#...# #...# .#.#. ..#.. ..#.. ..#.. ..#..",
}
CODE_CHARS = "".join(_GLYPHS)
GLYPH_W, GLYPH_H = 10, 14


@functools.cache
def glyph(char: str) -> np.ndarray:
    """The character as a 14 x 10 mask of 0 and 1 (each font pixel doubled)."""
    rows = [[c == "#" for c in line] for line in _GLYPHS[char].split()]
    return np.kron(np.array(rows, np.float32), np.ones((2, 2), np.float32))
