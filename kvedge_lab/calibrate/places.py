"""Turns places in images and texts into tokens of the prompt."""

from __future__ import annotations

import numpy as np

from kvedge_lab.calibrate.samples import Box, Labelled
from pykvedge.errors import UnsupportedError, UsageError
from pykvedge.models.model import Model
from pykvedge.models.vision import ImagePiece, Piece, TextPiece

ENOUGH = 0.25  # least share of a patch that the box covers, or share of the box in the patch


def tokens_in_grid(
    pixels: tuple[float, float, float, float], size: tuple[int, int], grid: tuple[int, int]
) -> np.ndarray:
    """Returns the tokens of an image that a box covers, row by row. size: of the image, grid: tokens (across, down).

    The image keeps its proportions and is centred on the grid, as llama.cpp pads it.
    """
    across, down = grid
    scale = min(across / size[0], down / size[1])
    shift = ((across - size[0] * scale) / 2, (down - size[1] * scale) / 2)
    left, top, right, bottom = (x * scale + shift[i % 2] for i, x in enumerate(pixels))
    x, y = np.arange(across), np.arange(down)
    over_x = np.clip(np.minimum(x + 1, right) - np.maximum(x, left), 0, None)
    over_y = np.clip(np.minimum(y + 1, bottom) - np.maximum(y, top), 0, None)
    cover = np.outer(over_y, over_x)
    enough = min(ENOUGH, ENOUGH * (right - left) * (bottom - top))
    return np.flatnonzero(cover >= enough * (1 - 1e-9))


def _images(sample: Labelled, pieces: list[Piece]) -> list[tuple[int, tuple[int, int]]]:
    """Returns first token and grid of every image. Raises UnsupportedError if the tokens' places are unknown."""
    out: list[tuple[int, tuple[int, int]]] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, ImagePiece):
            if piece.places is None:
                raise UnsupportedError(
                    "heads cannot be calibrated on boxes with this model, because the place of an image token in the "
                    "image is unknown"
                )
            out.append((at, (piece.places.across, piece.places.down)))
        at += piece.n_tokens
    if len(out) != len(sample.pictures):
        raise UnsupportedError(
            "heads cannot be calibrated on boxes with this model, because it cuts images into slices with unknown "
            "places"
        )
    return out


def tokens_of_boxes(sample: Labelled, pieces: list[Piece]) -> list[np.ndarray]:
    """Returns, per box, the tokens of the prompt that show the box, ascending."""
    if not sample.boxes:
        return []
    images = _images(sample, pieces)
    out = []
    for box in sample.boxes:
        first, grid = images[box.image]
        picture = sample.pictures[box.image]
        out.append(first + tokens_in_grid(box.pixels, (picture.width, picture.height), grid))
    return out


def tokens_of_needle(needle: str, pieces: list[Piece], model: Model) -> np.ndarray:
    """Returns the tokens whose text lies in the needle, ascending. Raises UsageError unless it occurs once."""
    text, starts, tokens, at = b"", [], [], 0
    for piece in pieces:
        if isinstance(piece, TextPiece):
            for i, token in enumerate(piece.tokens):
                starts.append(len(text))
                tokens.append(at + i)
                text += model.piece(token)
        else:
            text += b"\0"  # prevents a match across an image
        at += piece.n_tokens
    wanted = needle.encode()
    if text.count(wanted) != 1:
        raise UsageError(f"the needle {needle!r} does not occur exactly once in the prompt after the chat template")
    low = text.index(wanted)
    high = low + len(wanted)
    ends = [*starts[1:], len(text)]
    inside = [t for t, a, b in zip(tokens, starts, ends, strict=True) if a < high and min(b, high) > max(a, low)]
    return np.array(inside, dtype=np.int64)


def _occurrences(answer: bytes, box: Box, reference: str) -> list[tuple[int, int]]:
    """Returns the places (in bytes) where a generated answer has the text of the box."""
    if box.span is not None:
        whole, at = reference.encode(), answer.find(reference.encode())
        if not whole or at < 0 or answer.count(whole) != 1:
            return []
        low, high = (at + len(reference[:i].encode()) for i in box.span)
        return [(low, high)]
    found, text, at = [], box.text.encode(), 0
    while (at := answer.find(text, at)) >= 0:
        around = answer[max(at - 1, 0) : at], answer[at + len(text) : at + len(text) + 1]
        if not any(c.isalnum() for c in around):  # not a part of a longer word
            found.append((at, at + len(text)))
        at += 1
    return found


def boxes_of_tokens(generated: list[bytes], sample: Labelled) -> list[int | None]:
    """Returns the box of each generated token: the token lies where the answer has the text of that box.

    None: no box, or several boxes. With a needle, all tokens of the reference answer belong to box 0.
    """
    answer = b"".join(generated)
    boxes = (() if sample.needle else sample.boxes) or (Box(0, (0, 0, 0, 0), sample.answer),)
    spans = [(i, span) for i, box in enumerate(boxes) for span in _occurrences(answer, box, sample.answer)]
    out: list[int | None] = []
    at = 0
    for text in generated:
        low = at + len(text) - len(text.lstrip())
        high = at + len(text.rstrip())
        at += len(text)
        inside = {i for i, (a, b) in spans if a <= low < high <= b}
        out.append(inside.pop() if len(inside) == 1 else None)
    return out
