"""Asks mtmd for the number of tokens of an image, because mtmd cuts the images of some encoders by special rules.

This needs the files themselves: the model's vocabulary, and the image encoder with its weights, for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from pykvedge.models.encoder import Encoder
from pykvedge.models.gguf import Header
from pykvedge.models.images import Picture
from pykvedge.models.imagetokens import ImageGrid
from pykvedge.models.mmproj_values import read_tower
from pykvedge.models.model import Model
from pykvedge.models.offload import Offload
from pykvedge.models.vision import ImagePiece, Vision


def is_here(*headers: Header) -> bool:
    """Returns whether the complete files are on this machine. For a model by name, maybe only headers were fetched."""
    return all(header.path.is_file() and header.path.stat().st_size == header.file_size for header in headers)


def count(
    model: Header, mmproj: Header, sizes: Sequence[tuple[int, int]], limits: tuple[int, int] = (0, 0)
) -> list[ImageGrid]:
    """Returns the grids of images of these widths and heights. limits: least and most tokens; 0: mtmd's value.

    Raises what Model, Encoder and Vision.split raise.
    """
    with (
        closing(Model(model.path, Offload(device="none"), vocabulary_only=True)) as vocabulary,
        closing(Encoder(mmproj.path, vocabulary, 1, use_gpu=False, verbose=False, limits=limits)) as encoder,
    ):
        return [_grid(Vision(encoder), mmproj, size) for size in sizes]


def _grid(vision: Vision, mmproj: Header, size: tuple[int, int]) -> ImageGrid:
    pieces = vision.split(vision.marker, [Picture("an image", *size, b"")])
    parts = tuple(piece.n_rows for piece in pieces if isinstance(piece, ImagePiece))
    vision.release(pieces)
    tower = read_tower(mmproj)
    # lfm2's parts vary in size and have the patches of their tokens; other parts have the tower's patches
    own = max(parts) * tower.merge**2
    patches = own if tower.projector == "lfm2" else max(tower.patches**2, own)
    return ImageGrid(parts, patches, patches * tower.patch_size**2)
