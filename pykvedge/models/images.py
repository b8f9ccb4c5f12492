"""Loads files, file objects, bytes, arrays and PIL images as upright RGB pixels."""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.Image import Image as PillowImage

from pykvedge.errors import ArrayError, ImageError, KvedgeError, UsageError
from pykvedge.system import signals
from pykvedge.system.files import require_file

if TYPE_CHECKING:
    ImageSource: TypeAlias = (
        str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | PillowImage | np.ndarray | "Picture"
    )
    ImageSources: TypeAlias = ImageSource | Iterable[ImageSource] | None

MAX_PIXELS = 50_000_000  # about the largest phone photograph; models look at less than two million pixels
MAX_WEBP = 12_500_000  # pixels of a 12-megapixel photograph: libwebp takes 16 bytes per pixel
LARGE = 4_000_000  # pixels; smaller pictures are never scaled
_STRIP = 1 << 20  # pixels converted at once: a conversion of the whole picture takes 4 more bytes per pixel
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
# EXIF's orientation -> quarter turns to the left, and whether the picture is then mirrored
_TURNS = {2: (0, True), 3: (2, False), 4: (2, True), 5: (-1, True), 6: (-1, False), 7: (1, True), 8: (1, False)}
_one_at_a_time = threading.Lock()  # Python's warning filters are shared by all threads
PDF = re.compile(r"(?P<path>.*\.pdf)(?:\[(?P<pages>[^\[\]]*)\])?", re.IGNORECASE | re.DOTALL)  # path and pages
_BLANKS = b"\xef\xbb\xbf\0 \t\r\n"  # some programs write these before a PDF
FORMS = "a path, the bytes of an image file, an open file, a PIL image, or a uint8 array"


@dataclass(frozen=True)
class Picture:
    """width * height RGB pixels of 3 bytes, row by row.

    Without pixels (`rgb` is empty and `away` is None) it describes a picture that was read and forgotten. page: number
    in the document with the id `document`; 0: no page. in_file: pixels of the file, if the picture was scaled.
    away: reads pixels that are not in memory (pixel_file.py). note: a remark for the user about the reading.
    Raises ImageError if the number of bytes is wrong, or the pixels are too many.
    """

    name: str
    width: int
    height: int
    rgb: bytes
    page: int = 0
    document: str = ""
    in_file: int = field(default=0, compare=False)
    away: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        sizes = isinstance(self.width, int) and isinstance(self.height, int)
        page = isinstance(self.page, int) and isinstance(self.document, str)
        if not sizes or not page or not isinstance(self.rgb, (bytes, bytearray)):
            raise ImageError(
                f"{self.name}: a Picture needs a name, two whole numbers and bytes; use load_picture to make a Picture"
            )
        if not self.rgb:
            return
        _check_size(self.name, self.width, self.height)
        needed = 3 * self.width * self.height
        if len(self.rgb) != needed:
            given = f"{self.name} has {len(self.rgb)} bytes"
            raise ImageError(f"{given}; {self.width} x {self.height} RGB pixels are {needed}")

    @cached_property
    def key(self) -> str:
        """A digest that is equal for equal pixels."""
        found = hashlib.sha256(f"{self.width}x{self.height}".encode())
        found.update(self.pixels())
        return found.hexdigest()

    @property
    def n_bytes(self) -> int:
        """The bytes of the pixels, wherever they are; 0 if they are forgotten."""
        return 3 * self.width * self.height if self.rgb or self.away is not None else 0

    def pixels(self) -> bytes:
        """Returns the pixels, from memory or from `away`. Raises ImageError."""
        return self.rgb if self.rgb or self.away is None else self.away()


def is_pdf(source: Any) -> bool:
    """Returns whether a source is a PDF: by the name of a path, or by the first bytes of data."""
    if isinstance(source, (str, os.PathLike)):
        return PDF.fullmatch(os.fsdecode(source)) is not None
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source[:1024]).lstrip(_BLANKS).startswith(b"%PDF-")
    try:
        if not hasattr(source, "read") or not source.seekable():
            return False
        with signals.lifted():  # a user's file object may take a long time
            source.seek(0)
            head = source.read(1024)
            source.seek(0)
    except (OSError, ValueError, AttributeError):
        return False
    return isinstance(head, bytes) and is_pdf(head)


@signals.held()
def load_picture(source: ImageSource, name: str | None = None, seen: int = 0) -> Picture:
    """Makes a picture from a path, the bytes of an image file, an open file, a PIL image, or an array.

    Files may be jpg, png, webp, bmp or gif (its first frame). They are turned as their EXIF data says; transparency
    becomes white. Arrays are uint8, [height, width, 3] RGB, [height, width, 4] RGBA or [height, width] grey. An open
    file is read from its beginning, if it is seekable, and stays open. A Picture is returned unchanged.

    name: for messages if the source has no name; by default "image". seen: the most pixels that an encoder sees; a
    picture in a file is scaled by scaled_by(). 0: no picture is scaled. Raises ImageError if the picture cannot be read
    or has too many pixels, ArrayError for an array of another shape or type, UsageError for any other object.
    """
    what = name or "image"
    if is_pdf(source):
        named = os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else what
        raise ImageError(f"{named} is a PDF, not a picture; use pykvedge.pages to make pictures of its pages")
    if isinstance(source, Picture):
        if not source.n_bytes:
            raise ImageError(f"the pixels of {source.name} were freed; load the picture again")
        return source
    if isinstance(source, (str, os.PathLike)):
        return _from_path(source, seen)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_file(io.BytesIO(bytes(source)), what, what, seen)  # memoryviews of any layout
    if isinstance(source, np.ndarray):
        return _from_array(source, what)
    if isinstance(source, Image.Image):
        return _from_pillow(source, what)
    if hasattr(source, "read"):
        data, what = read_stream(source, what)
        return _from_file(io.BytesIO(data), what, Path(what).name, seen)
    raise UsageError(f"{what}: {kind_of(source)} is not a picture; give {FORMS}")


def picture_size(path: Path) -> tuple[int, int]:
    """Returns width and height of a picture as load_picture makes it, from the file's header. Raises ImageError."""
    with _explained(str(path), path), _opened(path) as image:
        lies = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5  # orientations from 5 on swap width and height
        _check_size(str(path), image.width, image.height)
        return (image.height, image.width) if lies else (image.width, image.height)


def notes(pictures: Iterable[object]) -> list[str]:
    """Returns the remarks for the user about the reading of the pictures."""
    return [one.note for one in pictures if isinstance(one, Picture) and one.note]


def is_one(images: Any) -> bool:
    one = (Picture, str, os.PathLike, bytes, bytearray, memoryview, np.ndarray, Image.Image)
    return isinstance(images, one) or hasattr(images, "read")


def kind_of(thing: object) -> str:
    return f"an object of type '{type(thing).__name__}'"


def _from_path(path: str | os.PathLike[str], seen: int) -> Picture:
    name = os.fsdecode(path)
    if "\0" in name or not name:
        raise ImageError("the path of an image is empty or contains a zero byte")
    place = Path(name)
    return _from_file(place, str(place), place.name, seen)


def read_stream(file: Any, what: str) -> tuple[bytes, str]:
    """Reads an open file. Returns its bytes and its name; the name is `what` if it has none."""
    given = getattr(file, "name", None)
    if isinstance(given, str) and given:
        what = given
    try:
        with signals.lifted():  # a user's file object may take a long time
            if getattr(file, "seekable", lambda: False)():
                file.seek(0)
            data = file.read()
    except (OSError, ValueError) as error:
        raise ImageError(f"{what} cannot be read: {error}") from None
    if isinstance(data, str):
        raise UsageError(f"{what} was opened as text; open the file with mode 'rb'")
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise UsageError(f"{what}: read() gave {kind_of(data)}, not bytes; open the file in binary mode")
    return bytes(data), what


def _from_file(file: Path | io.BytesIO, what: str, name: str, seen: int) -> Picture:
    """Opens an image. what: the subject of messages."""
    with _explained(what, file), _opened(file) as image:
        _check_size(what, image.width, image.height)
        pixels = image.width * image.height
        if image.format == "WEBP" and pixels > MAX_WEBP:
            raise ImageError(f"{what} has {image.width} x {image.height} pixels; the limit of WebP is "
                             f"{MAX_WEBP / 10**6} million; scale the image down, or convert it to JPEG")  # fmt: skip
        factor, wide = scaled_by(image.width, image.height, seen), image.width
        note = f"{name} is animated; only its first frame is read" if getattr(image, "is_animated", False) else ""
        if factor > 1:  # only JPEG reads less data then
            image.draft(image.mode, (max(wide // factor, 1), max(image.height // factor, 1)))
        rest = max(factor * image.width // wide, 1)
        return replace(_upright(image, what, name, rest), in_file=pixels if factor > 1 else 0, note=note)


def scaled_by(width: int, height: int, seen: int) -> int:
    """Returns the factor that scales a picture of a file down in each direction: a power of two, as in JPEG.

    Only pictures of more than LARGE and 8 times `seen` pixels are scaled; they keep at least twice `seen` pixels.
    """
    most = width * height // (2 * seen) if seen and width * height > LARGE else 1
    return 1 << (max(most, 1).bit_length() - 1) // 2


def scaled_size(width: int, height: int, seen: int) -> tuple[int, int]:
    """Returns the size of a picture of a file after loading."""
    factor = scaled_by(width, height, seen)
    return -(-width // factor), -(-height // factor)


def _head(file: Path | io.BytesIO) -> bytes:
    if not isinstance(file, Path):
        return file.getvalue()[:1024]
    with file.open("rb") as opened:
        return opened.read(1024)


def _opened(file: Path | io.BytesIO) -> PillowImage:
    if isinstance(file, Path):
        require_file(file)
    return Image.open(file, formats=FORMATS)


def _from_pillow(image: PillowImage, what: str) -> Picture:
    given = getattr(image, "filename", "")
    name = Path(given).name if isinstance(given, str) and given else what
    if image.mode == "F" or (image.mode == "I" and not getattr(image, "format", None)):
        raise ImageError(f"{name} has mode '{image.mode}', which does not define white; convert the image to RGB")
    with _explained(name):
        return _upright(image, name, name)


def _from_array(array: np.ndarray, what: str) -> Picture:
    shape = list(array.shape)
    if array.dtype != np.uint8:
        scale = ", scaled to 0..255" if array.dtype.kind in "fub" else ""
        raise ArrayError(f"{what} is an array of {array.dtype}; a picture must be uint8{scale}: array.astype('uint8')")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        advice = "[height, width, 3] or [height, width]"
        if array.ndim == 3 and array.shape[0] in (1, 3, 4):
            advice += "; use array.transpose(1, 2, 0) to put the channels last"
        elif array.ndim == 4:
            advice += "; for several pictures pass list(array)"
        raise ArrayError(f"{what} is an array of shape {shape}; a picture must be {advice}")
    _check_size(what, array.shape[1], array.shape[0])
    with _explained(what):
        return _upright(Image.fromarray(np.ascontiguousarray(array)), what, what)


def _upright(image: PillowImage, what: str, name: str, factor: int = 1) -> Picture:
    """Returns the upright picture. factor: this many rows and columns become one, the mean of their pixels."""
    _check_size(what, image.width, image.height)
    image.load()
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    width, height, rgb = -(-image.width // factor), -(-image.height // factor), io.BytesIO()
    rows = max(_STRIP // image.width // factor, 1) * factor
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        if strip.mode != "RGB" or "transparency" in image.info:
            strip = _on_white(strip)
        rgb.write((strip.reduce(factor) if factor > 1 else strip).tobytes())
    if turn is None:
        return Picture(name, width, height, rgb.getvalue())
    turned = np.rot90(np.frombuffer(rgb.getbuffer(), np.uint8).reshape(height, width, 3), turn[0])
    turned = turned[:, ::-1] if turn[1] else turned
    return Picture(name, turned.shape[1], turned.shape[0], turned.tobytes())


@contextmanager
def _explained(what: str, file: Path | io.BytesIO | None = None) -> Iterator[None]:
    """Turns errors of pillow inside the block into an ImageError about `what`, the content of `file`."""
    try:
        with _one_at_a_time, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # _check_size() checks the size more strictly
            yield
    except FileNotFoundError:
        raise ImageError(f"{what} does not exist") from None
    except UnidentifiedImageError:
        if file is not None and is_pdf(_head(file)):
            raise ImageError(
                f"{what} is a PDF, but its name does not end in .pdf; rename the file, or pass its bytes"
            ) from None
        raise ImageError(f"{what} is not a readable image; use jpg, png, webp, bmp, gif or pdf") from None
    except Image.DecompressionBombError:
        raise ImageError(
            f"{what} has too many pixels; the limit is {MAX_PIXELS // 10**6} million, so scale the image down"
        ) from None
    except MemoryError:
        raise ImageError(f"{what} does not fit in memory; scale the image down") from None
    except KvedgeError:
        raise
    except Exception as error:  # the bytes of a file decide what pillow raises, for example struct.error
        detail = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageError(f"{what} cannot be read: {detail}") from None


def _check_size(what: str, width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"{what} is empty")
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{what} has {width} x {height} pixels; the limit is {MAX_PIXELS // 10**6} million; scale the image down"
        )


def _on_white(image: PillowImage) -> PillowImage:
    clear = image.info.get("transparency")
    if image.mode.startswith("I"):  # 16-bit grey: convert() would clip instead of scale
        deep = np.asarray(image.convert("I"))
        grey = np.clip(deep // 257, 0, 255).astype(np.uint8)
        return Image.fromarray(grey if clear is None else np.where(deep == clear, np.uint8(255), grey)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or clear is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
