"""Adds limits to uvicorn's HTTP protocol over httptools, which has no limits and stores everything that it receives: on
the bytes of a request beside its body, on the time of its headers, and on waiting connections.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pykvedge.errors import RequestError
from pykvedge.serve import errors

HEAD = 64 << 10  # most bytes of a request's line and headers
HEAD_S = 60.0  # seconds for complete headers, from the connection or the request's first byte on
WAITING = 256  # most connections without a complete request; beyond, the connection that waits longest is closed
CONNECTIONS = 512 + WAITING  # most connections
_LINGER_S = 2.0  # seconds for the client to read the refusal
_FRAME = 8  # bytes around a chunk; every chunk has at least one byte of the body


class Protocol(HttpToolsProtocol):
    """Answers 400 and closes a connection whose line, headers, or chunk framing exceed HEAD bytes; closes a connection
    whose headers take more than HEAD_S seconds.

    waiting: connections without a complete request, or with an idle client, in the order of waiting. Beyond WAITING the
    first connection is closed, so a client that sends a complete request is always served.
    """

    _beside = 0  # bytes of this request outside its body, minus an allowance for chunk framing
    _alarm: asyncio.TimerHandle | None = None
    _refused = False

    def __init__(self, *arguments: Any, waiting: dict[Protocol, None], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._waiting = waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        self._stand_in_line()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        self._waiting.pop(self, None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._beside = 0
        self._wait()
        if self in self._waiting:
            self._stand_in_line()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Passes the request on. Its body may still be on the way."""
        self._came()
        if self in self._waiting:
            self._stand_in_line()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._waiting.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self._stand_in_line()

    def on_body(self, body: bytes) -> None:
        self._beside -= len(body) * (1 + _FRAME)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Takes bytes from the client. A request that begins in these bytes resets the count of bytes."""
        if self._refused:
            return
        self._beside += len(data)
        super().data_received(data)
        if self._beside > HEAD and not self._refused and not self.transport.is_closing():
            self.send_400_response(f"the headers of a request may have at most {HEAD >> 10} KiB")

    def send_400_response(self, msg: str) -> None:
        """Refuses an invalid request, and ignores further bytes: closing at once would reset the connection, and the
        client would lose the answer.
        """
        self._came()
        self._refused = True
        text = json.dumps(errors.body(RequestError(400, msg, "invalid_http"))).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + text)
        self.transport.write_eof()
        self._alarm = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _stand_in_line(self) -> None:
        self._waiting.pop(self, None)
        self._waiting[self] = None
        if len(self._waiting) > WAITING:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.transport.abort()

    def _wait(self) -> None:
        self._came()
        self._alarm = self.loop.call_later(HEAD_S, self.transport.abort)

    def _came(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
