"""Loads the pictures of requests: data: URLs, and https: and file: URLs if the server's options allow them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pykvedge.caches.memory import ByteCache
from pykvedge.errors import ImageError, RequestError
from pykvedge.models.documents import PageSize, named, pages
from pykvedge.models.images import Picture, load_picture
from pykvedge.serve.fetching import MAX_BYTES

_KNOWN_BYTES = 64 << 20  # bytes of pixels kept for the next message
# does not wait for a pipe, and does not follow a link that replaced the file
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_ESCAPED = {"%2b": "+", "%2f": "/", "%3d": "=", "%0a": "", "%0d": ""}  # letters of base64, and line breaks between them
_BLANKS = b"\t\n\f\r "
_DATA = re.compile(r"data:(?:image/[\w.+-]{1,40})?(?:;[\w=.+-]{1,80})*;base64,", re.IGNORECASE)
_PDF = re.compile(r"data:application/(?:x-)?pdf(?:;[\w=.+-]{1,80})*;base64,", re.IGNORECASE)
_HOW = "a data: URL of a picture must be data:image/...;base64, followed by the file in base64"


@dataclass(frozen=True)
class _Loaded:
    """A loaded picture, or the pages of a document. len(): bytes of their pixels."""

    pictures: tuple[Picture, ...]

    def __len__(self) -> int:
        return sum(len(picture.rgb) for picture in self.pictures)


@dataclass(frozen=True)
class Sources:
    """Where pictures may come from. https: allows https: URLs. files: folder that file: URLs may read; None: no file.

    fetched: bytes of fetched https: URLs, by URL. owner: of the request; an owner cannot find the pictures of others.
    page_size: size of drawn pages. stop: when set, stops the drawing. Clients send all pictures of a conversation with
    each message, so a cache decodes every data: URL once.
    """

    https: bool = False
    files: Path | None = None
    fetched: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    owner: str = ""
    page_size: PageSize = field(default_factory=PageSize)
    stop: threading.Event | None = None
    _known: ByteCache[_Loaded] = field(default_factory=lambda: ByteCache(_KNOWN_BYTES), repr=False, compare=False)

    def load(self, url: str, name: str) -> Picture:
        """Loads a picture. Raises RequestError for a URL that is not allowed, ImageError for an invalid picture."""
        picture = self._load(url, name)
        _ = picture.key  # computes the hash now, because it takes time
        return picture

    def pages(self, url: str, filename: str, most: int) -> Iterator[Picture]:
        """Draws pages of a PDF, at most `most`. filename: selects pages, as in report.pdf[3-7].

        Raises ImageError, UsageError, CancelledError.
        """
        place, chosen = named(filename) or (Path(filename), "")
        name = self._name_of(f"{url} {chosen}")
        known, drawn = self._known.get(name), list[Picture]()
        if known is not None and len(known.pictures) <= most:
            yield from known.pictures
            return
        data = _decoded(
            url, _PDF, "a data: URL of a file must be data:application/pdf;base64, followed by a PDF in base64"
        )
        for picture in pages(data, chosen, self.page_size, name=place.name[:100], most=most, stop=self.stop):
            drawn.append(picture)
            _ = picture.key  # computes the hash now, because it takes time
            yield picture
        self._known.put(name, _Loaded(tuple(drawn)))

    def _load(self, url: str, name: str) -> Picture:
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return self._data(url, name)
        if url in self.fetched:
            return load_picture(self.fetched[url], name, self.page_size.pixels)
        if scheme == "file" and self.files is not None:
            return load_picture(_read(_below(self.files, url), name), name, self.page_size.pixels)
        ways = ["data: URLs", *["https: URLs"] * self.https, *["file: URLs"] * (self.files is not None)]
        taken = " and ".join(ways)
        raise RequestError(400, f"{name}: this server accepts pictures only as {taken}", "invalid_image", "messages")

    def is_elsewhere(self, url: str) -> bool:
        """Returns whether a picture must be fetched before it can be loaded."""
        return self.https and url[:6].lower() == "https:"

    def knows(self, url: str) -> bool:
        """Returns whether loading a picture is fast, because its pixels are cached."""
        return url[:5].lower() == "data:" and self._known.get(self._name_of(url)) is not None

    def _data(self, url: str, name: str) -> Picture:
        known = self._known.get(self._name_of(url))
        if known is None:
            known = _Loaded((load_picture(_decoded(url, _DATA, _HOW), name, self.page_size.pixels),))
            self._known.put(self._name_of(url), known)
        return known.pictures[0]

    def _name_of(self, url: str) -> str:
        return self.owner + hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()


def _decoded(url: str, form: re.Pattern[str], how: str) -> bytes:
    """Returns the bytes of a data: URL. form: pattern of its beginning. how: error text for another beginning."""
    head = form.match(url[:512])
    if head is None:
        raise ImageError(how)
    text = url[head.end() :]
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise ImageError(f"the file of a picture or document may have at most {MAX_BYTES >> 20} MiB")
    try:
        if "%" in text:
            text = re.sub("%2[BbFf]|%3[Dd]|%0[AaDd]", lambda found: _ESCAPED[found[0].lower()], text)
        return base64.b64decode(text.encode("ascii").translate(None, _BLANKS), validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("the base64 text of a data: URL is invalid") from None


def _below(folder: Path, url: str) -> Path:
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve()
        inside = path.is_relative_to(folder.resolve())
    except (ValueError, OSError):
        inside = False
    if not inside or parts.netloc not in ("", "localhost"):
        raise RequestError(403, "this file is not in the folder of --image-folder", "forbidden_file", "messages")
    return path


def _read(path: Path, name: str) -> bytes:
    """Reads a regular file. Raises ImageError."""
    try:
        handle = os.open(path, _OPEN)
        try:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise ImageError(f"{name}: {path.name:.100} is not a regular file")
            if facts.st_size > MAX_BYTES:
                raise ImageError(f"{name}: the file of a picture may have at most {MAX_BYTES >> 20} MiB")
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read(MAX_BYTES)
        finally:
            os.close(handle)
    except OSError as error:
        raise ImageError(f"{name}: {path.name:.100} cannot be read: {(error.strerror or str(error)).lower()}") from None
