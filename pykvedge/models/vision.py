"""Cuts a prompt into text and image pieces, and turns images into embeddings."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pykvedge.caches.encoded import IMAGE_CACHE, Encoded
from pykvedge.errors import ImageError, StateError, UsageError
from pykvedge.models.encoder import Encoder
from pykvedge.models.images import Picture
from pykvedge.models.imagetokens import Places, places
from pykvedge.native import llamacpp


@dataclass
class TextPiece:
    tokens: list[int]

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


class Pruning(Protocol):
    """A plan's pruner (runtime/pruning.py)."""

    def choose(self, rows: np.ndarray, places: Places | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers [n] of the rows that the model reads, ascending, and the rows to read [n, width]."""


class PreparedPicture:
    """A picture whose parts are encoded one after the other. mtmd prepares all parts with the first part.

    Prepared pictures take twelve bytes per pixel that the encoder sees; only one picture is prepared at once.
    """

    def __init__(self, vision: Vision, picture: Picture) -> None:
        self._vision, self._picture = vision, picture
        self.n_parts = 0
        self._chunks: Any = None

    def encode(self, part: int, n_rows: int, look: Callable[[float], None], by: Encoder | None = None) -> np.ndarray:
        """Returns the embeddings of a part. by: another encoder of the same kind.

        Raises ImageError, StateError, and what `look` raises.
        """
        mtmd = self._vision.mtmd
        if self._chunks is None:
            self._chunks = self._vision.chunks(self._vision.marker, [self._picture], pixels=True)
        every = (mtmd.mtmd_input_chunks_get(self._chunks, i) for i in range(mtmd.mtmd_input_chunks_size(self._chunks)))
        kind = mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE
        parts = [chunk for chunk in every if mtmd.mtmd_input_chunk_get_type(chunk) == kind]
        try:
            if len(parts) != self.n_parts or mtmd.mtmd_input_chunk_get_n_tokens(parts[part]) != n_rows:
                raise ImageError(
                    f"{self._picture.name} cannot be prepared: its number of parts does not match its size"
                )
            return (by or self._vision.encoder).encode(parts[part], n_rows, look)
        finally:
            if part == self.n_parts - 1:
                self.close()

    def close(self) -> None:
        """Frees the prepared picture."""
        if self._chunks is not None:
            self._vision.mtmd.mtmd_input_chunks_free(self._chunks)
            self._chunks = None


@dataclass
class ImagePiece:
    """An image, or a part of an image, for the model: mtmd's chunk, and the embeddings after encoding."""

    chunk: Any  # mtmd_input_chunk *, owned; holds the image's size, no pixels
    n_tokens: int  # tokens that the model reads; before the encoding, the largest possible number
    key: str  # equal for pieces with equal embeddings
    n_rows: int  # rows that the encoder makes
    embeddings: np.ndarray | None = None  # [n_tokens, width] float32
    places: Places | None = None  # the grid of the rows; None: unknown
    kept: np.ndarray | None = None  # [n_tokens] numbers of the rows that stay, ascending; None: all rows
    pruning: Pruning | None = None  # chooses `kept`; None: the model reads all rows
    reused: bool = False  # the embeddings were cached, so nothing was encoded
    prepared: PreparedPicture | None = None  # encodes the piece; None: the embeddings exist
    part: int = 0  # number of the part in the image


Piece = TextPiece | ImagePiece


class Vision:
    """The view of one conversation on an encoder, which other conversations may share."""

    def __init__(self, encoder: Encoder, encoded: Encoded | None = None) -> None:
        """encoded: the shared cache of encoded images; None: this conversation has its own cache."""
        self.encoder, self.mtmd = encoder, encoder.mtmd
        self.marker = encoder.marker  # stands for a picture in the text of a prompt
        self._shared, self._encoded = encoded is not None, encoded or Encoded(encoder.width, IMAGE_CACHE)

    @property
    def handle(self) -> Any:
        return self.encoder.handle

    def non_causal(self) -> bool:
        """Returns whether the tokens of an image attend to each other in both directions."""
        return bool(self.mtmd.mtmd_decode_use_non_causal(self.handle, None))

    def split(self, text: str, pictures: list[Picture]) -> list[Piece]:
        """Cuts the prompt into pieces. `text` holds `marker` once per picture.

        Raises ImageError if a picture cannot be prepared, UsageError if the numbers of markers and pictures differ.
        """
        chunks = self.chunks(text, pictures, pixels=False)
        try:
            return self._pieces(chunks, pictures)
        finally:
            self.mtmd.mtmd_input_chunks_free(chunks)

    def chunks(self, text: str, pictures: list[Picture], pixels: bool) -> Any:
        """Returns mtmd's chunks of a prompt; without pixels, only sizes and places. Raises as split() does."""
        mtmd = self.mtmd
        data = text.encode("utf-8", "replace")
        given = mtmd.mtmd_input_text(data, len(data), False, True)
        chunks, bitmaps = mtmd.mtmd_input_chunks_init(), []
        made = False
        try:
            for i, picture in enumerate(pictures):
                bitmaps.append(self._bitmap(picture, str(i), pixels))
            array = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
            with llamacpp.collected_errors() as lines:
                status = mtmd.mtmd_tokenize(self.handle, chunks, ctypes.byref(given), array, len(bitmaps))
            if status == 1:
                raise UsageError(
                    f"the number of image places in the prompt differs from the number of images, {len(pictures)}"
                )
            if status != 0:
                names = ", ".join(p.name for p in pictures)
                raise ImageError(f"{names} cannot be prepared: {llamacpp.reason(lines, 'mtmd does not say why')}")
            made = True
            return chunks
        finally:
            if not made:
                mtmd.mtmd_input_chunks_free(chunks)
            for bitmap in bitmaps:
                mtmd.mtmd_bitmap_free(bitmap)

    def _bitmap(self, picture: Picture, name: str, pixels: bool) -> Any:
        # without pixels mtmd only computes the number of tokens
        rgb = picture.pixels() if pixels else b""
        data = rgb if isinstance(rgb, bytes) else (ctypes.c_uint8 * len(rgb)).from_buffer(rgb)  # mtmd copies the pixels
        start = ctypes.cast(data, ctypes.POINTER(ctypes.c_uint8)) if rgb else None
        bitmap = self.mtmd.mtmd_bitmap_init(picture.width, picture.height, start)
        self.mtmd.mtmd_bitmap_set_id(bitmap, name.encode())
        return bitmap

    def _pieces(self, chunks: Any, pictures: list[Picture]) -> list[Piece]:
        mtmd = self.mtmd
        out: list[Piece] = []
        prepared = [PreparedPicture(self, picture) for picture in pictures]
        for i in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, i)
            kind = mtmd.mtmd_input_chunk_get_type(chunk)
            if kind == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                n = ctypes.c_size_t()
                tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
                out.append(TextPiece(list(tokens[: n.value])))
            elif kind == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                n_rows = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
                which = int(mtmd.mtmd_input_chunk_get_id(chunk))
                tokens = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
                grid = (mtmd.mtmd_image_tokens_get_nx(tokens), mtmd.mtmd_image_tokens_get_ny(tokens))
                copy = mtmd.mtmd_input_chunk_copy(chunk)
                where = places(self.encoder.projector, grid, n_rows)
                one, key = prepared[which], f"{pictures[which].key}/{prepared[which].n_parts}"
                out.append(ImagePiece(copy, n_rows, key, n_rows, places=where, prepared=one, part=one.n_parts))
                one.n_parts += 1  # some models cut an image into slices, which are several chunks
            else:
                raise UsageError("the prompt has a part that is neither text nor image")
        return out

    def encode(self, piece: ImagePiece, look: Callable[[float], None] = lambda share: None) -> None:
        """Fills in the embeddings of a piece. Raises ImageError, StateError.

        look: called with the finished share; an exception from it ends the encoding.
        """

        def make() -> np.ndarray:
            if piece.prepared is None:
                raise StateError("the pixels of the image were freed; give the image again")
            return piece.prepared.encode(piece.part, piece.n_rows, look)

        piece.embeddings, piece.reused = self._encoded.rows(piece.key, piece.n_rows, make, look)
        if piece.pruning is not None and piece.n_tokens < piece.n_rows:
            piece.kept, piece.embeddings = piece.pruning.choose(piece.embeddings, piece.places)
            piece.n_tokens = len(piece.kept)

    def forget(self) -> None:
        """Drops the embeddings of all images, unless other conversations share them."""
        if not self._shared:
            self._encoded.memory.clear()

    def drop(self, piece: ImagePiece) -> None:
        """Frees the memory of an image that was read and will not be read again."""
        if not piece.reused:  # embeddings that were cached before stay for the other conversations
            self._encoded.memory.drop(piece.key)
        piece.embeddings = None
        self.release([piece])

    def release(self, pieces: list[Piece]) -> None:
        """Frees mtmd's memory of the pieces."""
        for piece in pieces:
            if isinstance(piece, ImagePiece) and piece.chunk:
                self.mtmd.mtmd_input_chunk_free(piece.chunk)
                piece.chunk = None
                if piece.prepared is not None:
                    piece.prepared.close()
