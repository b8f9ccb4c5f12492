"""What is left of each picture, patch by patch, for pages that draw it over the picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pykvedge.library.libkvedge import Cache
from pykvedge.models.vision import ImagePiece, Piece


def kept(cache: Cache, pieces: Iterable[Piece], first: int, sequence: int) -> dict[str, Any]:
    """Lists for each picture, layer by layer, the share of KV heads that hold a patch, in percent.

    pieces: of a prompt that was compressed, whose first token is number `first` of its sequence. A picture is
    {"rows", "columns", "padded", "share": [L][patches]}: row by row, of the picture centred on a square where it was
    padded; rows is 1 where nobody knows what a token shows. A patch that the model never read has 0.
    """
    images, at = [], first
    for piece in pieces:
        if isinstance(piece, ImagePiece):
            images.append((at, piece))
        at += piece.n_tokens
    heads = map(len, cache.lengths(sequence))
    shares = [_shares(cache, layer, n, at, sequence) for layer, n in enumerate(heads)]
    return {"layers": cache.layer_ids(), "images": [_described(piece, at, shares) for at, piece in images]}


def _shares(cache: Cache, layer: int, n_heads: int, n_tokens: int, sequence: int) -> np.ndarray:
    """[n_tokens] float64: what share of a stored layer's heads holds each token."""
    out = np.zeros(n_tokens)
    for head in range(n_heads):
        held = np.array(cache.tokens(layer, head, sequence), dtype=np.int64)
        out[held[held < n_tokens]] += 1 / n_heads
    return out


def _described(piece: ImagePiece, at: int, shares: list[np.ndarray]) -> dict[str, Any]:
    where = piece.places
    rows, columns = (where.down, where.across) if where is not None else (1, piece.n_rows)
    read = piece.kept if piece.kept is not None else np.arange(piece.n_tokens)
    share = np.zeros((len(shares), piece.n_rows))
    for row, layer in zip(share, shares, strict=True):
        row[read] = layer[at : at + piece.n_tokens]
    return {
        "rows": rows,
        "columns": columns,
        "padded": where is not None and where.padded,
        "share": np.rint(100 * share).astype(int).tolist(),
    }
