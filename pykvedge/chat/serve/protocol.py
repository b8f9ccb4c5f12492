"""HTTP as the server reads it: uvicorn's protocol over httptools, with bounds on what a request may send beside its
body, and on how long its headers may take. httptools has none, and keeps what it is sent.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 64 << 10  # bytes of a request's line and headers
HEAD_S = 60.0  # until they are complete, from the connection or the request's first byte on
_FRAME = 8  # bytes around a chunk, of which each has a byte of the body at least


class Protocol(HttpToolsProtocol):
    """Answers 400 and hangs up where the line, the headers, or what stands around chunks takes more than HEAD bytes,
    and hangs up where they take more than HEAD_S seconds.
    """

    _beside = 0  # bytes of this request that were not its body, less what frames its chunks
    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begins to count for another request."""
        self._beside = 0
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Hands the request on."""
        self._came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body."""
        self._beside -= len(body) * (1 + _FRAME)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Takes what the client sent. A request that begins in these bytes does not answer for those before it."""
        self._beside += len(data)
        super().data_received(data)
        if self._beside > HEAD and not self.transport.is_closing():
            self.send_400_response(f"A request may send {HEAD >> 10} KiB beside its body.")

    def _wait(self) -> None:
        self._came()
        self._alarm = self.loop.call_later(HEAD_S, self.transport.abort)

    def _came(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
