"""Loads pictures in all forms, and PDF pages as pictures, one at a time.

PDFium draws the pages in a child process with limits (pdf_worker.py), because PDFium is not thread-safe and a hostile
file may crash or stall it. Each document has its own child process, which ends after the last page.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pykvedge.errors import CancelledError, ImageError, UsageError
from pykvedge.models import pdf_worker, sandbox
from pykvedge.models.gguf import Header
from pykvedge.models.images import FORMS, MAX_PIXELS, PDF, Picture, is_one, is_pdf, kind_of, load_picture, read_stream
from pykvedge.models.imagetokens import seen_at_most, token_limits
from pykvedge.system import signals
from pykvedge.system.files import require_file

if TYPE_CHECKING:
    from pykvedge.models.images import ImageSources

MAX_PAGES = 64  # pages of a document that are loaded at once
MAX_STREAMED = 10_000  # pages of a document that are drawn and read one by one
SECONDS = 30.0  # time limit of a document; of a page, if pages are read one by one
DPI = 200  # largest resolution of a page: the usual resolution of scanners
_RANGE = re.compile(r"\s*(\d{1,7})\s*(?:(-)\s*(\d{1,7})?\s*)?", re.ASCII)
_MAX_RANGES = 64
_MAX_HEADER = 1 << 12  # bytes of a page's header


@dataclass(frozen=True)
class PageSize:
    """The size of drawn pages: as large as the encoder can see, and no larger.

    pixels: most pixels of a page. side: longest side, in pixels.
    """

    pixels: int = 1 << 22
    side: int = 1 << 11  # for encoders that cut images into tiles

    @classmethod
    def of(cls, mmproj: Header, limits: tuple[int, int] | None) -> PageSize:
        """limits: the least and the most tokens of an image, from token_limits."""
        pixels, side = seen_at_most(mmproj, limits)
        return cls(min(pixels, MAX_PIXELS // 2), side) if pixels else cls()

    @classmethod
    def asked(cls, mmproj: Header, least: int = 0, most: int = 0) -> PageSize:
        """least, most: tokens of an image that the user asks for, or 0. Raises UsageError as token_limits does."""
        return cls.of(mmproj, token_limits(mmproj, least, most))


def load_pictures(
    images: ImageSources, size: PageSize | None = None, most: int = 0, stop: threading.Event | None = None
) -> Iterator[Picture]:
    """Yields one picture or several, each loaded on demand. Pictures without a name are numbered: image 1, image 2.

    A PDF (report.pdf, report.pdf[3-7], or the bytes of a PDF) gives a picture per page. size: size of drawn pages.
    most: pages of a document; 0: as many as are loaded at once. stop: ends the drawing with CancelledError. Raises
    UsageError, ArrayError or ImageError.
    """
    given: Any = images
    if given is None:
        return iter(())
    if is_one(given):
        return iter(_loaded(given, None, size, most, stop))
    if not isinstance(given, Iterable):
        raise UsageError(f"{kind_of(given)} is not a picture; give {FORMS}, or a list of pictures")
    several = enumerate(signals.items(given), start=1)
    return itertools.chain.from_iterable(_loaded(image, f"image {i}", size, most, stop) for i, image in several)


def _loaded(
    source: Any, name: str | None, size: PageSize | None, most: int, stop: threading.Event | None
) -> Iterable[Picture]:
    if not is_pdf(source):
        return [load_picture(source, name, size.pixels if size is not None else 0)]
    if hasattr(source, "read"):
        source, name = read_stream(source, name or "image")
    name, most = Path(name or "the document").name, most or MAX_PAGES
    return pages(source, size=size, name=name, most=most, stop=stop)


def named(path: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """Splits report.pdf[3-7] into the file and its pages ("": all pages). Returns None if the path names no PDF.

    Raises UsageError for empty brackets.
    """
    found = PDF.fullmatch(os.fsdecode(path))
    if found is None:
        return None
    if found["pages"] is not None and not found["pages"].strip():
        raise UsageError(f"{os.fsdecode(path)} does not name a page; write for example {Path(found['path']).name}[3-7]")
    return Path(found["path"]), found["pages"] or ""


def file_of(path: Path) -> Path:
    """Returns the file of report.pdf[3-7]; returns any other path unchanged. Raises UsageError."""
    return (named(path) or (path, ""))[0]


def ranges(pages: str) -> list[tuple[int, int | None]]:
    """Reads "3-7", "2", "1,4-6" or "9-" as pairs of first and last page; None: up to the last page.

    Raises UsageError.
    """
    out: list[tuple[int, int | None]] = []
    for part in pages.split(",") if pages else ():
        found = _RANGE.fullmatch(part)
        first = int(found[1]) if found else 0
        last = None if found is None or (found[2] and not found[3]) else int(found[3] or first)
        if first < 1 or (last is not None and last < first) or len(out) == _MAX_RANGES:
            raise UsageError(f"pages must be numbers from 1 or ranges, for example [2], [3-7] or [1,4-6], not "
                             f"[{pages:.40}]")  # fmt: skip
        out.append((first, last))
    return out


def pages(
    source: str | os.PathLike[str] | bytes,
    chosen: str = "",
    size: PageSize | None = None,
    *,
    name: str = "",
    most: int = MAX_PAGES,
    stop: threading.Event | None = None,
) -> Iterator[Picture]:
    """Yields pages of a PDF as pictures: upright, in colour, with notes and filled forms, on white.

    source: a path, optionally with pages (report.pdf[3-7]), or the bytes of a file. chosen: "3-7", "2", "1,4-6", "9-";
    empty: all. size: size of drawn pages; None: for an encoder that cuts images into tiles. name: name of bytes in
    messages. most: largest number of pages. A page is drawn on demand; setting `stop` ends the drawing.

    Raises UsageError if pypdfium2 is missing and for missing or too many pages, ImageError for a file that is damaged,
    encrypted or too slow, CancelledError.
    """
    if not isinstance(source, (str, os.PathLike, bytes, bytearray, memoryview)) or not isinstance(chosen, str):
        raise UsageError(f"a PDF must be a path or bytes, and pages must be text such as '3-7', not {source!r:.40} and "
                         f"{chosen!r:.40}")  # fmt: skip
    if isinstance(source, (bytes, bytearray, memoryview)):
        what, place, data = name or "the document", None, bytes(source)
        document = hashlib.sha256(data).hexdigest()
    else:
        place, asked = named(source) or (Path(source), "")
        data, what, chosen = b"", place.name, chosen or asked
        try:
            require_file(place)
        except FileNotFoundError:
            raise ImageError(f"{place} does not exist") from None
        except (OSError, ValueError) as error:
            raise ImageError(f"{place} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        document = hashlib.sha256(os.fsencode(place.resolve())).hexdigest()
    if importlib.util.find_spec("pypdfium2") is None:
        raise UsageError(f"reading {what} needs pypdfium2, which is not installed: pip install 'kvedge[pdf]'")
    if not sandbox.can_start():
        raise UsageError(
            f"reading {what} needs a Python program, which cannot be started here; convert the pages to images"
        )
    size = size or PageSize()
    request: dict[str, Any] = {"pages": ranges(chosen), "most": most, "seconds": SECONDS}
    request |= {"pixels": size.pixels, "side": size.side, "dpi": DPI}
    return _pages(place or data, what, document[:16], request, stop)


def _pages(
    source: Path | bytes, what: str, document: str, request: dict[str, Any], stop: threading.Event | None
) -> Iterator[Picture]:
    left = SECONDS
    with _drawing(source, what, request) as process:
        while True:
            began = time.monotonic()
            with sandbox.watched(process, left, pdf_worker.MEMORY, stop) as why:
                picture = _next(process, what, document)
                if picture is None and process.wait() != 0 and not why:
                    why.append("drawing its pages crashed")
            left = SECONDS if request["most"] > MAX_PAGES else max(left - (time.monotonic() - began), 0.1)
            if stop is not None and stop.is_set():
                raise CancelledError
            if picture is None:
                if why:
                    raise ImageError(
                        f"{what} cannot be read: {why[0]}; name fewer pages, or convert the pages to images"
                    )
                return
            yield picture


@contextmanager
def _drawing(source: Path | bytes, what: str, request: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        with source.open("rb") if isinstance(source, Path) else tempfile.TemporaryFile() as file:
            if isinstance(source, bytes):
                file.write(source)
                file.seek(0)
            process = sandbox.start(pdf_worker.__file__, json.dumps(request), given=file)
    except OSError as error:
        raise ImageError(f"{what} cannot be read: {error.strerror or error}") from None
    try:
        yield process
    finally:
        sandbox.end(process)


def _next(process: subprocess.Popen[bytes], what: str, document: str) -> Picture | None:
    """Reads a page from pdf_worker.py. Returns None at the end. Raises ImageError, UsageError."""
    pipe: IO[bytes] = process.stdout or io.BytesIO()
    line = pipe.readline(_MAX_HEADER)
    if not line.endswith(b"\n"):
        return None
    try:
        told = json.loads(line)
        page, width, height = (0, 0, 0) if "error" in told else (int(told[n]) for n in ("page", "width", "height"))
    except (LookupError, TypeError, ValueError):  # the file took over the worker
        raise ImageError(f"{what} cannot be read: the program that draws its pages gave an invalid answer") from None
    if "error" in told:
        raise (UsageError if told.get("usage") else ImageError)(f"{what} {told['error']}")
    rgb = pipe.read(3 * width * height) if 0 < width * height <= MAX_PIXELS else b""
    if len(rgb) != 3 * width * height:
        return None
    return Picture(f"{what}, page {page}", width, height, rgb, page, document)
