"""Kept patches drawn over the image, layer by layer. Pillow only."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw
from PIL.Image import Image as PillowImage

from kvedge_lab.inspect.collect import Findings, Shown

TILE = 240  # pixels of the longer side of one layer's picture
GAP, LABEL = 8, 18
DARKEST = 0.12  # brightness of a patch that no head keeps


def _seen(shown: Shown) -> PillowImage:
    """The picture as the model saw it: as it is, or centred on a square."""
    picture = Image.frombytes("RGB", (shown.picture.width, shown.picture.height), shown.picture.rgb)
    if shown.places is not None and shown.places.padded and picture.width != picture.height:
        side = max(picture.size)
        square = Image.new("RGB", (side, side))
        square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
        picture = square
    scale = TILE / max(picture.size)
    return picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))


def patches(picture: PillowImage, share: np.ndarray) -> PillowImage:
    """The picture, each patch as bright as the share of heads that keeps it. share: [rows, columns], 0 to 1."""
    rows, columns = share.shape
    y = np.arange(picture.height) * rows // picture.height
    x = np.arange(picture.width) * columns // picture.width
    light = DARKEST + (1 - DARKEST) * share[np.ix_(y, x)]
    return Image.fromarray((np.asarray(picture, dtype=np.float64) * light[..., None]).round().astype(np.uint8))


def _on_grid(share: np.ndarray, shown: Shown, n: int) -> np.ndarray:
    """Puts what is kept of each token where it lies among n patches; those that no token shows keep nothing."""
    if shown.rows is None:
        return share
    out = np.zeros(n)
    out[shown.rows] = share
    return out


def kept_patches(findings: Findings, method: str, shown: Shown) -> PillowImage:
    """One sheet: the picture, and for each layer what its heads keep of it. Needs shown.places."""
    rows, columns = (shown.places.down, shown.places.across) if shown.places else (1, shown.count)
    picture = _seen(shown)
    share = findings.keep_share(method)[:, shown.first : shown.first + shown.count]
    tiles = [("image", picture)]
    for number, row in zip(findings.layers, share, strict=True):
        label = f"layer {number}: {100 * row.mean():.0f} %"
        tiles.append((label, patches(picture, _on_grid(row, shown, rows * columns).reshape(rows, columns))))
    across = min(len(tiles), 6)
    down = -(-len(tiles) // across)
    width, height = picture.width + GAP, picture.height + GAP + LABEL
    sheet = Image.new("RGB", (across * width + GAP, down * height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (label, tile) in enumerate(tiles):
        left, top = GAP + i % across * width, GAP + i // across * height
        draw.text((left, top), label, fill="black")
        sheet.paste(tile, (left, top + LABEL - 2))
    return sheet
