"""Shows kept patches over the image: for all layers together, and per layer, as labelled tiles."""

from __future__ import annotations

import numpy as np
from PIL import Image
from PIL.Image import Image as PillowImage

from kvedge_lab.inspect.collect import Findings, PromptImage

TILE = 240  # longer side of a tile, in pixels
DARKEST = 0.12  # brightness of a patch that no head keeps


def _seen(image: PromptImage) -> PillowImage:
    """Returns the picture as the model sees it: unchanged, or centred on a square."""
    picture = Image.frombytes("RGB", (image.picture.width, image.picture.height), image.picture.rgb)
    if image.places is not None and image.places.padded and picture.width != picture.height:
        side = max(picture.size)
        square = Image.new("RGB", (side, side))
        square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
        picture = square
    scale = TILE / max(picture.size)
    return picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))


def patches(picture: PillowImage, share: np.ndarray) -> PillowImage:
    """Returns the picture; a patch is as bright as its share of heads that keep it. share: [rows, columns], 0 to 1."""
    rows, columns = share.shape
    y = np.arange(picture.height) * rows // picture.height
    x = np.arange(picture.width) * columns // picture.width
    light = DARKEST + (1 - DARKEST) * share[np.ix_(y, x)]
    return Image.fromarray((np.asarray(picture, dtype=np.float64) * light[..., None]).round().astype(np.uint8))


def _on_grid(share: np.ndarray, image: PromptImage, n: int) -> np.ndarray:
    """Returns [n]: the share of each patch of the grid; 0 for patches without a token."""
    if image.rows is None:
        return share
    out = np.zeros(n)
    out[image.rows] = share
    return out


def _tile(picture: PillowImage, share: np.ndarray, image: PromptImage) -> PillowImage:
    rows, columns = (image.places.down, image.places.across) if image.places else (1, image.count)
    return patches(picture, _on_grid(share, image, rows * columns).reshape(rows, columns))


def _shares(findings: Findings, method: str, image: PromptImage) -> np.ndarray:
    """Returns [L, count]: the share of a layer's heads that keep a token of the image."""
    return findings.keep_share(method)[:, image.first : image.first + image.count]


def by_method(findings: Findings, image: PromptImage) -> list[tuple[str, PillowImage]]:
    """Returns the picture, and a tile per method for all layers together. The most kept patch is the brightest."""
    picture = _seen(image)
    shares = {method: _shares(findings, method, image).mean(axis=0) for method in findings.kept}
    most = max(share.max() for share in shares.values()) or 1.0
    kept = {f"{name}: {100 * share.mean():.0f} %": share / most for name, share in shares.items()}
    return [("image", picture), *((label, _tile(picture, share, image)) for label, share in kept.items())]


def by_layer(findings: Findings, method: str, image: PromptImage) -> list[tuple[str, PillowImage]]:
    """Returns a tile per layer: what the layer's heads keep of the picture."""
    picture, shares = _seen(image), _shares(findings, method, image)
    layers = zip(findings.layers, shares, strict=True)
    return [(f"layer {number}: {100 * share.mean():.0f} %", _tile(picture, share, image)) for number, share in layers]
