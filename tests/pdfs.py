"""Writes PDFs for tests, object by object."""

from pathlib import Path

from PIL import Image

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}


def pdf(*objects: bytes, trailer: bytes = b"") -> bytes:
    """Returns a file of these objects, numbered from 1. The first object is the catalog."""
    out, places = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    xref = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    root = b"" if b"/Root" in trailer else b"/Root 1 0 R"
    out += b"trailer\n<< /Size %d %b %b >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, root, trailer, xref)
    return bytes(out)


def stream(content: bytes, more: bytes = b"") -> bytes:
    return b"<< /Length %d %b >>\nstream\n%b\nendstream" % (len(content), more, content)


def fill(colour: str, x: float = 0, y: float = 0, width: float = 1e5, height: float = 1e5) -> bytes:
    """Returns the commands that draw a rectangle. By default it covers the page."""
    red, green, blue = (c / 255 for c in COLOURS[colour])
    return b"%g %g %g rg %g %g %g %g re f\n" % (red, green, blue, x, y, width, height)


def document(*contents: bytes, box=(0, 0, 72, 72), page: bytes = b"", more: tuple[bytes, ...] = ()) -> bytes:
    """Returns a document with one page per content. page: more entries of each page. more: objects after them.

    Page i is object 3 + 2 * i; the first of `more` is object 3 + 2 * len(contents).
    """
    n = len(contents)
    kids = b" ".join(b"%d 0 R" % (3 + 2 * i) for i in range(n))
    sides = b" ".join(b"%g" % side for side in box)
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count %d /Kids [%b] >>" % (n, kids)]
    for i, content in enumerate(contents):
        objects.append(b"<< /Type /Page /Parent 2 0 R /MediaBox [%b] /Contents %d 0 R %b >>" % (sides, 4 + 2 * i, page))
        objects.append(stream(content))
    return pdf(*objects, *more)


def of_pictures(path: Path, *pictures: Path) -> Path:
    """Writes one page for each picture. A pixel is a point wide and high."""
    first, *others = [Image.open(picture).convert("RGB") for picture in pictures]
    first.save(path, save_all=True, append_images=others)
    return path
