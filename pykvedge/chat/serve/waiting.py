"""A request waits for its jobs here: events come from the engine's threads, and a client that leaves ends its jobs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.requests import Request as HttpRequest

from pykvedge.chat.serve.engine import Engine
from pykvedge.chat.serve.errors import LEFT
from pykvedge.chat.serve.job import Done, Event, Failed, Job, Request
from pykvedge.errors import CancelledError, RequestError

_LOOK_S = 0.25  # between two looks at whether the client is still there


class Waiting:
    """The jobs of one HTTP request. Use it in a with statement: what is not done by its end is given up."""

    def __init__(self, engine: Engine, http: HttpRequest) -> None:
        self._engine, self._http = engine, http
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.jobs: list[Job] = []

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            if not job.over:
                self._engine.cancel(job)

    def submit(self, request: Request) -> Job:
        """Hands a request to the engine. Raises RequestError, StateError."""
        loop, number = asyncio.get_running_loop(), len(self.jobs)

        def emit(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(self._events.put_nowait, (number, event))
            except RuntimeError:  # the loop is closed: the server has gone down
                return

        job = self._engine.submit(request, emit)
        self.jobs.append(job)
        return job

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yields events with the number of their job, until all jobs are over.

        Raises RequestError where the client left.
        """
        over, looked = 0, time.monotonic()
        while over < len(self.jobs):
            number, event = -1, None
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                number, event = await asyncio.wait_for(self._events.get(), _LOOK_S)
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                if await self._http.is_disconnected():
                    raise RequestError(LEFT, "the client left")
            if isinstance(event, Done) and event.report.finish == "cancelled":
                event = Failed(CancelledError())  # not by this client, who is there
            if event is not None:
                over += isinstance(event, (Done, Failed))
                yield number, event
