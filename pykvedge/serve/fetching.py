"""Fetches pictures behind https: URLs, with limits on time and size. Stops when no request waits for the pictures.

Only public addresses are allowed. A host name is looked up once, the address is checked, and the connection uses this
address with a verified certificate. Every redirect is checked in the same way.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from pykvedge.errors import ImageError, RequestError

MAX_BYTES = 20 << 20  # per picture
_REQUEST_BYTES = 64 << 20  # all pictures of a request
_REDIRECTS, _SECONDS = 3, 20.0  # redirects per picture; seconds for all pictures of a request
_REQUESTS, _AT_ONCE = 32, 6  # requests that fetch at the same time; parallel downloads per request
_ADDRESSES = 4  # most addresses of a host to try
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PUBLIC = ipaddress.ip_network("2000::/3")
_SAFE = "/%:@!$&'()*+,;=~?"


class Fetching:
    """Fetches the pictures of requests in an event loop."""

    def __init__(self) -> None:
        self._requests = 0

    async def all(self, urls: Iterable[str]) -> dict[str, bytes]:
        """Returns the bytes behind https: URLs, by URL. Raises ImageError, RequestError."""
        if self._requests >= _REQUESTS:
            raise RequestError(503, "too many requests are downloading pictures; try again later", "busy", retry_s=5)
        self._requests += 1
        try:
            return await asyncio.wait_for(_fetched(dict.fromkeys(urls)), _SECONDS)
        except (TimeoutError, asyncio.TimeoutError):
            raise ImageError(
                f"downloading the pictures takes longer than {_SECONDS:.0f} seconds; send the pictures as data: URLs"
            ) from None
        finally:
            self._requests -= 1


async def _fetched(urls: Iterable[str]) -> dict[str, bytes]:
    at_once, left = asyncio.Semaphore(_AT_ONCE), [_REQUEST_BYTES]
    out: dict[str, bytes] = {}

    async def one(url: str) -> None:
        async with at_once:
            out[url] = await fetch(url, left)

    tasks = [asyncio.ensure_future(one(url)) for url in urls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return out


async def fetch(url: str, left: list[int]) -> bytes:
    """Returns the bytes behind an https: URL. left: [bytes that may still be read], is reduced. Raises ImageError."""
    async with httpcore.AsyncConnectionPool(ssl_context=_context(), network_backend=_Public()) as pool:
        for _ in range(_REDIRECTS + 1):
            found = await _get(pool, _checked(url), left)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
    raise ImageError(f"the URL of a picture redirects more than {_REDIRECTS} times; send the final URL")


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = f":{parts.port}" if parts.port else ""
        good = parts.scheme == "https" and host and parts.username is None
    except ValueError:
        good = False
    if not good:
        raise ImageError("the URL of a picture, and each redirect, must have the form https://HOST/PATH")
    where = f"[{host}]" if ":" in host else host
    query = f"?{quote(parts.query, _SAFE)}" if parts.query else ""
    return f"https://{where}{port}{quote(parts.path, _SAFE) or '/'}{query}"


async def _get(pool: httpcore.AsyncConnectionPool, url: str, left: list[int]) -> bytes | str:
    """Returns the bytes, or the URL of a redirect."""
    try:
        async with pool.stream("GET", url, headers={"Accept": "image/*", "User-Agent": "kvedge"}) as response:
            if response.status in (301, 302, 303, 307, 308):
                places = [value for name, value in response.headers if name.lower() == b"location"]
                return places[0].decode("latin-1") if places else ""
            if response.status != 200:
                raise ImageError(f"the picture cannot be downloaded: its host answers with status {response.status}")
            data = bytearray()
            async for part in response.aiter_stream():
                data += part
                left[0] -= len(part)
                if len(data) > MAX_BYTES or left[0] < 0:
                    raise ImageError(f"a downloaded picture may have at most {MAX_BYTES >> 20} MiB, and all pictures "
                                     f"of a request at most {_REQUEST_BYTES >> 20} MiB")  # fmt: skip
            return bytes(data)
    except (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
        raise ImageError(f"the picture cannot be downloaded: {error or type(error).__name__}") from None


@functools.cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Public(httpcore.AsyncNetworkBackend):
    """Connects only to public addresses, and looks each host name up once."""

    def __init__(self) -> None:
        self._plain = httpcore.AnyIOBackend()

    async def connect_tcp(self, host: str, port: int, *args: Any, **more: Any) -> httpcore.AsyncNetworkStream:
        """Connects to a host. Raises ImageError for a host that is not public, httpcore.ConnectError."""
        error: Exception = httpcore.ConnectError("its host has no address")
        for address in await public_addresses(host, port):
            try:
                return await self._plain.connect_tcp(address, port, *args, **more)
            except httpcore.NetworkError as refused:
                error = refused
        raise error


async def public_addresses(host: str, port: int) -> Sequence[str]:
    """Returns up to 4 addresses of a host. Raises ImageError if any address is not public."""
    try:
        found = await _looked_up(host, port)
    except (OSError, UnicodeError):
        raise ImageError(f"the host of a picture, {host:.100}, is unknown") from None
    if not found or not all(map(is_public, found)):
        raise ImageError(f"the host of a picture, {host:.100}, is not a public host")
    return found[:_ADDRESSES]


async def _looked_up(host: str, port: int) -> list[str]:
    """Returns the system's addresses of a host. Uses a thread that may outlive a cancelled request."""
    answer = Future[list[str]]()
    answer.set_running_or_notify_cancel()  # so that cancelling the waiting task cannot cancel this future

    def look() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.set_result([str(entry[4][0]) for entry in found])
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=look, daemon=True, name="kvedge-lookup").start()
    return await asyncio.wrap_future(answer)


def is_public(address: str) -> bool:
    """Returns whether an address is on the public internet. An embedded IPv4 address decides for its IPv6 address."""
    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(number, ipaddress.IPv6Address):
        embedded = number.ipv4_mapped or number.sixtofour
        if number in _NAT64:
            embedded = ipaddress.IPv4Address(int(number) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
        if number not in _PUBLIC or number.teredo is not None:
            return False
    return number.is_global and not number.is_multicast and not number.is_reserved
