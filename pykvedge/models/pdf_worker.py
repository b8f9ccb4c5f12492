"""Draws pages of a PDF in a separate process, which a hostile file may crash (models/documents.py starts it).

Standard input is the file. Each page is a line of JSON on standard output, followed by its RGB pixels. A line with
`error` is the last line; its text follows the file's name in messages.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from pykvedge.errors import ImageError, UsageError
from pykvedge.system.shown import counted

MEMORY = 1 << 30  # bytes of address space
MAX_INCHES = 200  # length of a side: the limit of the format
_PASSWORD, _SECURITY = 4, 5  # PDFium's error numbers
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # Linux's CLONE_NEWUSER and CLONE_NEWNET


def chosen(ranges: list[list[int | None]], n_pages: int, most: int) -> list[int]:
    """Returns page numbers, from 1 on. ranges: first and last page of each; None as last page: to the end.

    Raises UsageError.
    """
    out: dict[int, None] = {}
    for first, last in ranges or [[1, None]]:
        if not first or max(first, last or 0) > n_pages:
            asked = max(first or 0, last or 0)
            raise UsageError(f"has {counted(n_pages, 'page')}, but page {asked} was requested")
        for page in range(first, (last or n_pages) + 1):
            out[page] = None
            if len(out) > most:
                why = (
                    f"has too many pages to read at once; name up to {most} of its {n_pages} pages, for example "
                    f"[1-{most}]"
                )
                raise UsageError(why)
    return list(out)


def scale_of(size: tuple[float, float], request: dict[str, Any]) -> float:
    """Returns pixels per point: as many as the limits allow, and at most `dpi` per inch."""
    width, height = size
    if not all(math.isfinite(side) and 0 < side <= 72 * MAX_INCHES for side in size):
        raise ImageError(f"is {width / 72:.6g} x {height / 72:.6g} inches large; a page must have sides above 0, "
                         f"and {MAX_INCHES} inches at most")
    fits = min(request["side"] / max(size), math.sqrt(request["pixels"] / (width * height)))
    return min(fits, request["dpi"] / 72) * (1 - 1e-6)  # sizes are rounded up


def draw(file: BinaryIO, request: dict[str, Any]) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields number, width, height and pixels of each page. Raises ImageError, UsageError."""
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        if error.err_code in (_PASSWORD, _SECURITY):
            raise ImageError(
                "is encrypted: save the file without a password, for example with `qpdf --decrypt`"
            ) from None
        raise ImageError("cannot be read as a PDF: the file is damaged, or has no pages") from None
    numbers = chosen(request["pages"], len(pdf), request["most"])
    with suppress(pypdfium2.PdfiumError):
        pdf.init_forms()  # draws filled forms
    for number in numbers:
        _more_time(request["seconds"])
        try:
            page = pdf[number - 1]
            bitmap = page.render(scale=scale_of(page.get_size(), request), rev_byteorder=True, limit_image_cache=True)
        except ImageError as error:
            raise ImageError(f"page {number} {error}") from None
        except pypdfium2.PdfiumError:
            raise ImageError(f"page {number} is damaged") from None
        row = 3 * bitmap.width
        rows = memoryview(bitmap.buffer).cast("B")
        pixels = b"".join(rows[y : y + row] for y in range(0, bitmap.stride * bitmap.height, bitmap.stride))
        yield number, bitmap.width, bitmap.height, pixels
        bitmap.close()
        page.close()


def _more_time(seconds: float) -> None:
    """Allows the next page `seconds` of CPU time, even if the parent is gone."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds) + 1)


def _lower(limit: int, most: int) -> None:
    import resource

    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _limit() -> None:
    """Limits memory (Linux; elsewhere the parent does), forbids written files and, if Linux allows it, the network."""
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)
    with suppress(ImportError):
        import resource

        for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
            with suppress(ValueError, OSError):
                resource.setrlimit(limit, (most, most))


def main(file: BinaryIO, answers: BinaryIO, request: dict[str, Any]) -> None:
    """Writes the pages, or an error."""

    def tell(**fields: Any) -> None:
        answers.write(json.dumps(fields).encode() + b"\n")

    _limit()
    try:
        for number, width, height, pixels in draw(file, request):
            tell(page=number, width=width, height=height)
            answers.write(pixels)
            answers.flush()
    except (ImageError, UsageError) as error:
        tell(error=str(error), usage=isinstance(error, UsageError))
    except MemoryError:
        tell(error="takes too much memory", usage=False)
    answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer, json.loads(sys.argv[1]))
