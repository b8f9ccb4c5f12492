"""Pictures as requests name them: data: URLs; https: and file: only where the server was told to take them.

What is fetched from elsewhere comes from a public address that was looked up once and is the one connected to, over a
checked certificate, in bounded time and size; every redirect is looked at in the same way.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import ipaddress
import re
import socket
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from pykvedge.errors import ImageError, RequestError
from pykvedge.models.images import Picture, load_picture
from pykvedge.runtime.bytecache import ByteCache

_KNOWN_BYTES = 64 << 20  # of pixels that are kept for the next message
MOST_BYTES = 20 << 20  # of one picture's file
_REDIRECTS, _SECONDS = 3, 20.0
_DATA = re.compile(r"data:(?:image/[\w.+-]{1,40})?(?:;[\w=.+-]{1,80})*;base64,", re.IGNORECASE)


@dataclass(frozen=True)
class _Loaded:
    """A picture that was loaded. len(): bytes of its pixels."""

    picture: Picture

    def __len__(self) -> int:
        return len(self.picture.rgb)


@dataclass(frozen=True)
class Sources:
    """Where pictures may come from besides the request. files: the folder that file: URLs may name files of.

    Clients send the pictures of a conversation with each of its messages: those in data: URLs are unpacked once.
    """

    https: bool = False
    files: Path | None = None
    _known: ByteCache[_Loaded] = field(default_factory=lambda: ByteCache(_KNOWN_BYTES), repr=False, compare=False)

    def load(self, url: str, name: str) -> Picture:
        """Loads a picture. Raises RequestError for a URL that is not taken, ImageError for what is no picture."""
        picture = self._load(url, name)
        _ = picture.key  # which takes time, here where there is time
        return picture

    def _load(self, url: str, name: str) -> Picture:
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return self._data(url, name)
        if scheme == "https" and self.https:
            return load_picture(fetch(url), name)
        if scheme == "file" and self.files is not None:
            return load_picture(_below(self.files, url))
        ways = ["data: URLs", *["https: URLs"] * self.https, *["file: URLs"] * (self.files is not None)]
        taken = " and ".join(ways)
        raise RequestError(400, f"{name}: this server takes pictures as {taken}", "invalid_image", "messages")


    def knows(self, url: str) -> bool:
        """Tells whether loading this picture takes next to no time."""
        return url[:5].lower() == "data:" and self._known.get(_name_of(url)) is not None

    def _data(self, url: str, name: str) -> Picture:
        known = self._known.get(_name_of(url))
        if known is None:
            known = _Loaded(load_picture(_decoded(url), name))
            self._known.put(_name_of(url), known)
        return known.picture


def _name_of(url: str) -> str:
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()


def _decoded(url: str) -> bytes:
    head = _DATA.match(url[:512])
    if head is None:
        raise ImageError("a data: URL of a picture is data:image/...;base64, and then the file in base64")
    text = url[head.end() :]
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise ImageError(f"a picture's file may have {MOST_BYTES >> 20} MiB")
    try:
        return base64.b64decode(unquote(text) if "%" in text else text, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("the base64 of a picture's data: URL is damaged") from None


def _below(folder: Path, url: str) -> Path:
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve()
        inside = path.is_relative_to(folder.resolve())
    except (ValueError, OSError):
        inside = False
    if not inside or parts.netloc not in ("", "localhost"):
        raise RequestError(403, "the server was not told to read this file", "forbidden_file", "messages")
    return path


# ------------------------------------------------------------------------------------------------------- https


class _Pinned(http.client.HTTPSConnection):
    """Connects to the address that was looked at, whatever the name stands for by now."""

    def __init__(self, host: str, port: int, address: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout, context=ssl.create_default_context())
        self._address = address

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = self._context.wrap_socket(plain, server_hostname=self.host)  # type: ignore[attr-defined]


def fetch(url: str) -> bytes:
    """Returns the bytes behind an https: URL. Raises ImageError."""
    end = time.monotonic() + _SECONDS
    for _ in range(_REDIRECTS + 1):
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 443
        except ValueError:
            host = None
        if parts.scheme != "https" or not host or parts.username is not None:
            raise ImageError("the URL of a picture is https://HOST/PATH, also where it leads elsewhere")
        answer = _get(_Pinned(host, port, public_address(host, port), _left(end)), parts.path or "/", parts.query, end)
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise ImageError("the URL of a picture leads elsewhere again and again")


def public_address(host: str, port: int) -> str:
    """Looks a name up. Raises ImageError where it stands for this machine, or one of a private network."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ImageError(f"the host of a picture, {host:.100}, is not known") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(_is_public(address) for address in addresses):
        raise ImageError(f"the host of a picture, {host:.100}, is no public one")
    return addresses[0]


def _is_public(address: str) -> bool:
    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(number, "ipv4_mapped", None)
    return (mapped or number).is_global and not (mapped or number).is_multicast


def _get(connection: http.client.HTTPSConnection, path: str, query: str, end: float) -> bytes | str:
    """Returns the bytes, or where they are instead."""
    try:
        connection.request("GET", path + (f"?{query}" if query else ""), headers={"Accept": "image/*"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            return response.headers.get("Location", "")
        if response.status != 200:
            raise ImageError(f"the host of a picture answers with status {response.status}")
        data = bytearray()
        while part := response.read(1 << 16):
            data += part
            _left(end)
            if len(data) > MOST_BYTES:
                raise ImageError(f"a picture's file may have {MOST_BYTES >> 20} MiB")
        return bytes(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ImageError(f"a picture cannot be fetched: {error}") from None
    finally:
        connection.close()


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise ImageError(f"fetching a picture takes longer than {_SECONDS:.0f} seconds")
    return left
