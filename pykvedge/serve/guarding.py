"""Guards all routes: checks who may send requests, and limits the size and time of requests. Plain ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pykvedge.errors import RequestError, UsageError
from pykvedge.serve import errors
from pykvedge.serve.bodies import Bounds

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_DISCARDED, _DISCARD_S = 256 << 20, 2.0  # most bytes and seconds for reading a body that is refused
_BODIES = 4  # most bodies of the largest size in memory at once
_SMALL = 1 << 20  # bytes: a smaller body is accepted even when large bodies fill the memory
_QUICK = 1 << 16  # bytes: a smaller body is checked without a thread
OPEN = ("/health", "/v1/health", "/")  # paths without a key: the health check, and the page, which asks for the key
_FEW = 1 << 16  # bytes of pictures that routes without pictures tolerate
# keys of an ASGI scope: owner of the request, bytes of pictures in its body, other bytes of its body
OWNER, PICTURES, TEXT = "kvedge.owner", "kvedge.pictures", "kvedge.text"
_KEY_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_MAX_KEYS = 4096
LOCAL = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?")  # origins on this machine


@dataclass(frozen=True)
class Key:
    """An API key. secret: the key. owner: 32 hexadecimal digits that identify its owner, equal after restarts."""

    secret: str
    owner: str


@dataclass(frozen=True)
class Rules:
    """Rules for requests. hosts: allowed names in the Host header; empty: any. keys: allowed API keys; empty: no key.

    origins: pages that may ask, beside the server's own, as https://name:port; "localhost": LOCAL; "*": all. body: most
    bytes of a request. body_s: most seconds until a request has arrived. bounds: limits of the body's JSON.
    """

    hosts: frozenset[str] = frozenset()
    keys: tuple[Key, ...] = ()
    origins: tuple[str, ...] = ()
    body: int = 64 << 20
    body_s: float = 60.0
    bounds: Bounds = field(default_factory=Bounds)


class Guarding:
    """An ASGI application that checks requests for another application."""

    def __init__(self, app: Any, rules: Rules) -> None:
        self._app, self._rules = app, rules
        self._held = 0  # bytes of all bodies in memory or arriving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        body = bytearray()
        try:
            try:
                self._check(scope, headers)
            except RequestError:
                await _discard(headers, receive)
                raise
            if not await asyncio.wait_for(self._arrive(body, headers, receive), self._rules.body_s):
                self._held -= len(body)
                return
            check = self._rules.bounds.check
            scope[PICTURES] = check(body) if len(body) <= _QUICK else await asyncio.to_thread(check, body)
            scope[TEXT] = len(body) - scope[PICTURES]
        except BaseException as error:
            self._held -= len(body)
            if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
                error = RequestError(
                    408, "the request took too long to arrive; send the whole request at once", "timeout"
                )
            if not isinstance(error, RequestError):
                raise
            response = errors.response(error)
            response.headers["connection"] = "close"  # the rest of the body is not read
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, _with_headers(send))
            return
        n_bytes = len(body)
        try:
            await self._app(scope, _replayed(body, receive), _with_headers(send))
        finally:
            self._held -= n_bytes

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        def told(name: bytes) -> str:
            return headers.get(name, b"").decode("latin-1")

        rules, host = self._rules, told(b"host").strip().lower()
        if sum(name.lower() == b"host" for name, _ in scope["headers"]) > 1:
            raise RequestError(400, "the request has several Host headers; send one", "invalid_host")
        if rules.hosts and host_name(host) not in rules.hosts:
            raise RequestError(
                403,
                "the Host header names an unknown host; start the server with --allow-host NAME to allow it",
                "forbidden_host",
            )
        origin = told(b"origin").strip().lower()
        if origin and not self._invited(origin, host):
            raise RequestError(403, f"web pages of {origin:.80} are not allowed to use this server; start the server "
            f"with "
                               "--allow-origin to allow them", "forbidden_origin")  # fmt: skip
        scope[OWNER] = ""
        if rules.keys and not (scope["method"] == "GET" and _open(scope["path"])):
            shown = told(b"authorization")
            given = shown[7:].strip() if shown[:7].lower() == "bearer " else told(b"x-api-key")
            owner = owner_of(given, rules.keys)
            if owner is None:
                raise RequestError(401, "a valid API key is needed: Authorization: Bearer KEY", "invalid_api_key")
            scope[OWNER] = owner

    def _invited(self, origin: str, host: str) -> bool:
        """Returns whether pages of an origin may ask: the server's pages, pages of a proxy with one of the server's
        names (not a name of this machine, where any program may listen), and pages of the allowed origins.
        """
        origins = self._rules.origins
        if origin in origins or "*" in origins or ("localhost" in origins and LOCAL.fullmatch(origin)):
            return True
        where = origin.partition("://")[2]
        return where == host or (where in self._rules.hosts and not is_loopback(where))

    async def _arrive(self, data: bytearray, headers: dict[bytes, bytes], receive: Receive) -> bool:
        """Reads the body. Returns False if the client left. Raises RequestError for a body that is too large."""
        most, told = self._rules.body, headers.get(b"content-length", b"0")
        too_large = RequestError(413, f"the request is larger than {most / (1 << 20):.3g} MiB; send less", "too_large")
        if told.isdigit() and int(told[:20]) > most:
            await _discard(headers, receive)
            raise too_large
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return False
            part = message.get("body", b"")
            data += part
            self._held += len(part)
            full = len(data) > _SMALL and self._held > _BODIES * most
            if full or len(data) > most:
                if message.get("more_body"):
                    await _discard(headers, receive)
                raise (
                    RequestError(503, "the server has too many large requests; try again later", "busy", retry_s=2)
                    if full
                    else too_large
                )
            if not message.get("more_body"):
                return True


def without_pictures(scope: Scope) -> None:
    """Raises RequestError for a body with pictures, on a route that takes no pictures."""
    if scope.get(PICTURES, 0) > _FEW:
        raise RequestError(413, f"{scope['path']:.100} does not accept pictures", "too_large")


def _open(path: str) -> bool:
    return path in OPEN or path.startswith("/page/")


def host_name(host: str) -> str:
    """Returns the host name of a Host header, without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _replayed(body: bytearray, receive: Receive) -> Receive:
    given = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if not given:
            given = True
            whole = bytes(body)
            body.clear()
            return {"type": "http.request", "body": whole, "more_body": False}
        return await receive()

    return again


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return sending


async def _discard(headers: dict[bytes, bytes], receive: Receive) -> None:
    """Reads the rest of a body, within limits: closing earlier would reset the connection and lose the response."""

    async def rest() -> None:
        n = 0
        while n < _DISCARDED:
            message = await receive()
            n += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return

    if b"expect" in headers:  # the client waits for permission, and sends no body
        return
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(rest(), _DISCARD_S)


def owner_of(given: str, keys: Sequence[Key]) -> str | None:
    """Returns the owner of a key, or None for an unknown key. Takes equal time for all keys."""
    found = None
    for key in keys:
        if hmac.compare_digest(given.encode("utf-8", "replace"), key.secret.encode()):
            found = key.owner
    return found


def read_keys(path: Path) -> tuple[Key, ...]:
    """Reads a key file: one key per line, optionally with the owner's name. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--key-file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    keys, names = dict[str, Key](), set[str]()
    for number, line in enumerate(lines, 1):
        secret, *name = line.split() or [""]
        if not secret or secret.startswith("#"):
            continue
        where = f"--key-file {path} line {number}"
        if not 16 <= len(secret) <= 1024 or not secret.isascii() or not secret.isprintable():
            raise UsageError(f"{where}: a key must have 16 to 1024 printable ASCII characters without blanks")
        if len(name) > 1 or not all(_KEY_NAME.fullmatch(one) for one in name):
            raise UsageError(f"{where}: after a key only one name is allowed, of letters, digits and .-_@")
        if secret in keys or names & set(name):
            raise UsageError(f"{where}: this key or its name occurs twice; remove one")
        names.update(name)
        owner = f"name {name[0]}" if name else f"key {secret}"
        keys[secret] = Key(secret, hashlib.sha256(f"kvedge {owner}".encode()).hexdigest()[:32])
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise UsageError(f"--key-file {path} must have 1 to {_MAX_KEYS} keys, one per line")
    return tuple(keys.values())
