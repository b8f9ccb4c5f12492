"""Makes one batch of a whole prompt (text and images) for bounded prefill, which runs each layer once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from pykvedge.errors import KvedgeError
from pykvedge.models.model import Model
from pykvedge.models.token_table import TokenTable
from pykvedge.models.vision import ImagePiece, Piece, TextPiece, Vision

N_POS = 4  # positions of an M-RoPE token: time, row, column, unused


@dataclass(frozen=True)
class OnePass:
    """A prompt as one batch. positions: [1 or 4, T] int32. image_mask: [T] uint8. end: position of the next token.
    embeddings: [T, width] float32, or None for pure text, which has tokens [T] int32 (llama.cpp adds M-RoPE axes)."""

    positions: np.ndarray
    image_mask: np.ndarray
    end: int
    embeddings: np.ndarray | None = None
    tokens: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.image_mask)


def why_not(vision: Vision | None, pieces: list[Piece]) -> str:
    """Returns why the pieces cannot go through a layer in one causal pass, or an empty string if they can."""
    if vision is not None and vision.non_causal() and any(isinstance(p, ImagePiece) for p in pieces):
        return "this model uses bidirectional attention among the tokens of an image"
    return ""


def gather_text(pieces: list[Piece], start: int) -> OnePass:
    """Makes a batch of text pieces. start: position of the first token."""
    tokens = np.array([t for p in pieces if isinstance(p, TextPiece) for t in p.tokens], dtype=np.int32)
    positions = np.arange(start, start + len(tokens), dtype=np.int32)[None, :]
    return OnePass(positions, np.zeros(len(tokens), dtype=np.uint8), start + len(tokens), tokens=tokens)


def gather(pieces: list[Piece], table: TokenTable, vision: Vision, model: Model, start: int) -> OnePass:
    """Makes a batch of text pieces and encoded images. start: position of the first token.

    Pads text rows with zeros where image rows are wider, as llama.cpp does for deep stacks of image features. Raises
    UnsupportedError, and KvedgeError for an image that was not encoded.
    """
    n = sum(p.n_tokens for p in pieces)
    mrope = model.has_mrope
    embeddings = np.zeros((n, model.n_embd_input), dtype=np.float32)
    positions = np.zeros((N_POS if mrope else 1, n), dtype=np.int32)
    mask = np.zeros(n, dtype=np.uint8)
    at, past = 0, start
    for piece in pieces:
        here = slice(at, at + piece.n_tokens)
        if isinstance(piece, TextPiece):
            embeddings[here, : table.width] = table.rows(piece.tokens)
            positions[: 3 if mrope else 1, here] = np.arange(past, past + piece.n_tokens)
            past += piece.n_tokens
        else:
            if piece.embeddings is None:
                raise KvedgeError("the image was not encoded; encode the image before decoding")
            embeddings[here, : piece.embeddings.shape[1]] = piece.embeddings
            mask[here] = 1
            positions[:, here], past = image_positions(vision, piece, past, mrope, gaps=True)
        at += piece.n_tokens
    return OnePass(positions, mask, past, embeddings=embeddings)


def image_positions(vision: Vision, piece: ImagePiece, past: int, mrope: bool, gaps: bool) -> tuple[np.ndarray, int]:
    """Returns the positions [1 or 4, n] int32 of an image's tokens, and the position of the token after the image.

    past: position of the first token. gaps: whether llama.cpp accepts gaps between positions. Rows of a pruned image
    keep their places with M-RoPE or with gaps; otherwise positions are consecutive.
    """
    mtmd = vision.mtmd
    if not mrope:
        if piece.kept is None or not gaps:
            end = past + piece.n_tokens
            return np.arange(past, end, dtype=np.int32)[None, :], end
        return (past + piece.kept).astype(np.int32)[None, :], past + piece.n_rows
    tokens = mtmd.mtmd_input_chunk_get_tokens_image(piece.chunk)
    places = (mtmd.mtmd_decoder_pos * piece.n_rows)()
    mtmd.mtmd_helper_image_get_decoder_pos(tokens, past, places)
    flat = np.frombuffer(places, dtype=np.uint32).reshape(piece.n_rows, ctypes.sizeof(mtmd.mtmd_decoder_pos) // 4)
    flat = flat if piece.kept is None else flat[piece.kept]
    t, x, y, z = flat.T[:N_POS].astype(np.int32)
    return np.stack([t, y, x, z]), past + mtmd.mtmd_input_chunk_get_n_pos(piece.chunk)
