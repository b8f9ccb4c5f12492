"""Kept patches over the image: of all layers together, and layer by layer, as labelled tiles."""

from __future__ import annotations

import numpy as np
from PIL import Image
from PIL.Image import Image as PillowImage

from kvedge_lab.inspect.collect import Findings, Shown

TILE = 240  # pixels of the longer side of a tile
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


def _tile(picture: PillowImage, share: np.ndarray, shown: Shown) -> PillowImage:
    rows, columns = (shown.places.down, shown.places.across) if shown.places else (1, shown.count)
    return patches(picture, _on_grid(share, shown, rows * columns).reshape(rows, columns))


def _shares(findings: Findings, method: str, shown: Shown) -> np.ndarray:
    """[L, count]: share of a layer's heads that keep a token of the image."""
    return findings.keep_share(method)[:, shown.first : shown.first + shown.count]


def by_method(findings: Findings, shown: Shown) -> list[tuple[str, PillowImage]]:
    """The picture, and what all layers together keep of it by each method; the brightest patch is the most kept one."""
    picture = _seen(shown)
    shares = {method: _shares(findings, method, shown).mean(axis=0) for method in findings.kept}
    most = max(share.max() for share in shares.values()) or 1.0
    kept = {f"{name}: {100 * share.mean():.0f} %": share / most for name, share in shares.items()}
    return [("image", picture), *((label, _tile(picture, share, shown)) for label, share in kept.items())]


def by_layer(findings: Findings, method: str, shown: Shown) -> list[tuple[str, PillowImage]]:
    """What the heads of each layer keep of the picture."""
    picture, shares = _seen(shown), _shares(findings, method, shown)
    layers = zip(findings.layers, shares, strict=True)
    return [(f"layer {number}: {100 * share.mean():.0f} %", _tile(picture, share, shown)) for number, share in layers]
