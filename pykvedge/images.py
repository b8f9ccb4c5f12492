"""Images: any file that pillow reads, as upright RGB pixels."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pykvedge.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

MAX_PIXELS = 50_000_000  # about the largest phone photograph; models look at less than two million
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")


@dataclass(frozen=True)
class Picture:
    """width * height RGB pixels of 3 bytes, row by row."""

    name: str
    width: int
    height: int
    rgb: bytes

    @property
    def key(self) -> str:
        """Equal for equal pixels."""
        size = f"{self.width}x{self.height}".encode()
        return hashlib.sha256(size + self.rgb).hexdigest()


def load_picture(path: str | os.PathLike[str]) -> Picture:
    """Reads a jpg, png, webp, bmp or gif (its first frame), turned as its EXIF data says, transparency on white.

    Raises ImageError with one line that says why it cannot be read.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    path = Path(path)
    try:
        if path.is_dir():
            raise ImageError(f"{path} is a folder, not an image")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked below, more strictly
            with Image.open(path, formats=FORMATS) as image:
                _check_size(path, image.width, image.height)
                image.load()
                upright = ImageOps.exif_transpose(image) or image
                rgb = _on_white(upright)
    except FileNotFoundError:
        raise ImageError(f"{path} does not exist") from None
    except UnidentifiedImageError:
        raise ImageError(f"{path} is no image that can be read; use jpg, png, webp, bmp or gif") from None
    except Image.DecompressionBombError:
        raise ImageError(f"{path} has too many pixels; the limit is {MAX_PIXELS // 10**6} million") from None
    except MemoryError:
        raise ImageError(f"{path} does not fit into memory; scale it down") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError) as error:
        detail = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageError(f"{path} cannot be read: {detail}") from None
    return Picture(path.name, rgb.width, rgb.height, rgb.tobytes())


def _check_size(path: Path, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{path} has {width} x {height} pixels; the limit is {MAX_PIXELS // 10**6} million, scale it down"
        )
    if width < 1 or height < 1:
        raise ImageError(f"{path} is empty")


def _on_white(image: PillowImage) -> PillowImage:
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode.startswith("I"):  # 16-bit grey: convert() would clip instead of scale
        return image.convert("I").point(lambda value: value / 257).convert("L").convert("RGB")
    return image.convert("RGB")
