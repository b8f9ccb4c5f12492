"""What stands before every route: whose requests are taken, and how large and slow they may be. Plain ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from pykvedge.chat.serve import errors
from pykvedge.errors import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_DISCARDED, _DISCARD_S = 256 << 20, 2.0  # bytes and seconds of a body that nobody reads
_BODIES = 4  # as many of the largest requests may be here at once
OPEN = ("/health", "/")  # without a key: whether there is anybody, and the page, which asks for it


@dataclass(frozen=True)
class Rules:
    """hosts: names that a Host header may have; empty: any. key: what must be shown; empty: nothing.

    body: bytes of a request; body_s: seconds that it may take to arrive.
    """

    hosts: frozenset[str] = frozenset()
    key: str = ""
    body: int = 64 << 20
    body_s: float = 60.0


class Guarding:
    """Wraps an ASGI application."""

    def __init__(self, app: Any, rules: Rules) -> None:
        self._app, self._rules = app, rules
        self._held = 0  # bytes of bodies that are here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            await self._checked(scope, headers, receive)
            body = await asyncio.wait_for(self._body(headers, receive), self._rules.body_s)
        except (TimeoutError, asyncio.TimeoutError):
            await _refuse(send, RequestError(408, "the request took too long to arrive", "timeout"))
            return
        except RequestError as error:
            await _refuse(send, error)
            return
        if body is None:
            return
        self._held += len(body)
        try:
            await self._app(scope, _replayed(body, receive), _with_headers(send))
        finally:
            self._held -= len(body)

    async def _checked(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> None:
        try:
            self._check(scope, headers)
        except RequestError:
            await _discard(headers, receive)
            raise

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        rules = self._rules
        if rules.hosts and host_name(headers.get(b"host", b"").decode("latin-1")) not in rules.hosts:
            raise RequestError(403, "the Host header names another server", "forbidden_host")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and rules.hosts and host_name(origin.partition("://")[2]) not in rules.hosts:
            raise RequestError(403, "pages of other sites may not ask this server", "forbidden_origin")
        if rules.key and not (scope["method"] == "GET" and _open(scope["path"])):
            shown = headers.get(b"authorization", b"").decode("latin-1")
            given = (
                shown[7:].strip()
                if shown[:7].lower() == "bearer "
                else headers.get(b"x-api-key", b"").decode("latin-1")
            )
            if not hmac.compare_digest(given.encode("latin-1"), rules.key.encode()):
                raise RequestError(401, "a valid API key is needed: Authorization: Bearer KEY", "invalid_api_key")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Reads the body; None where the client left."""
        most, told = self._rules.body, headers.get(b"content-length", b"0")
        too_large = RequestError(413, f"a request may have {most >> 20} MiB", "too_large")
        if told.isdigit() and int(told[:20]) > most:
            await _discard(headers, receive)
            raise too_large
        data = bytearray()
        if self._held > _BODIES * most:
            await _discard(headers, receive)
            raise RequestError(503, "too many large requests at once", "busy", retry_s=2)
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            data += message.get("body", b"")
            if len(data) > most:
                if message.get("more_body"):
                    await _discard(headers, receive)
                raise too_large
            if not message.get("more_body"):
                return bytes(data)


def _open(path: str) -> bool:
    return path in OPEN or path.startswith("/page/")


def host_name(host: str) -> str:
    """Returns the name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def is_loopback(host: str) -> bool:
    """Tells whether only programs of this machine reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _replayed(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return sending


async def _discard(headers: dict[bytes, bytes], receive: Receive) -> None:
    """Takes what is left of a body, within bounds: a connection that is closed on it is reset, and the answer lost."""

    async def rest() -> None:
        n = 0
        while n < _DISCARDED:
            message = await receive()
            n += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return

    if b"expect" in headers:  # it asks first, and sends nothing then
        return
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(rest(), _DISCARD_S)


async def _refuse(send: Send, error: RequestError) -> None:
    body = json.dumps(errors.body(error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    headers.append((b"connection", b"close"))  # what is left of a body is not read
    if error.retry_s:
        headers.append((b"retry-after", str(error.retry_s).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
