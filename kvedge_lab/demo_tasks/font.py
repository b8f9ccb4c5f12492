"""A 5x7 bitmap font for the printed codes. With a built-in font every Pillow version draws the same pixels."""

from __future__ import annotations

import functools

import numpy as np

# No 0, 1, I, O, S, B, which look alike. No C, D, H, W: words of the questions start with them, and the tokenizer would
# merge a code with these words.
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
    """Returns the character as a 14 x 10 mask of 0 and 1; each font pixel is doubled."""
    rows = [[c == "#" for c in line] for line in _GLYPHS[char].split()]
    return np.kron(np.array(rows, np.float32), np.ones((2, 2), np.float32))
