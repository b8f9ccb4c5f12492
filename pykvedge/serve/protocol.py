"""HTTP as the server reads it: uvicorn's protocol over httptools, with bounds on what a request may send beside its
body, on how long its headers may take, and on connections that wait for their client. httptools has none, and keeps
what it is sent.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pykvedge.errors import RequestError
from pykvedge.serve import errors

HEAD = 64 << 10  # bytes of a request's line and headers
HEAD_S = 60.0  # until they are complete, from the connection or the request's first byte on
WAITING = 256  # connections without a complete request: beyond, the one that waits longest is closed
CONNECTIONS = 512 + WAITING  # of all
_LINGER_S = 2.0  # for the client to read why it is refused
_FRAME = 8  # bytes around a chunk, of which each has a byte of the body at least


class Protocol(HttpToolsProtocol):
    """Answers 400 and hangs up where the line, the headers, or what stands around chunks takes more than HEAD bytes,
    and hangs up where they take more than HEAD_S seconds.

    waiting: the connections whose request has not come completely, or whose client is idle, in the order in which they
    began to wait. Where there are more than WAITING, the first is closed: whoever sends a complete request gets in.
    """

    _beside = 0  # bytes of this request that were not its body, less what frames its chunks
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
        """Hands the request on. Its body may still be on the way."""
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
        """Takes what the client sent. A request that begins in these bytes does not answer for those before it."""
        if self._refused:
            return
        self._beside += len(data)
        super().data_received(data)
        if self._beside > HEAD and not self._refused and not self.transport.is_closing():
            self.send_400_response(f"a request may send {HEAD >> 10} KiB beside its body")

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no request, and passes over what else comes: a connection that is closed on it is reset, and
        the answer lost.
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
