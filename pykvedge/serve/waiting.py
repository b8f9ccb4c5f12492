"""Waits for the jobs of a request: takes events from the scheduler's threads, and cancels jobs if the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from starlette.requests import Request as HttpRequest

from pykvedge.errors import CancelledError, RequestError
from pykvedge.serve.errors import LEFT
from pykvedge.serve.job import Done, Event, Failed, Job, Request, Step, Text
from pykvedge.serve.scheduler import Scheduler
from pykvedge.system.guard import Closing

# Text within this time after earlier text is sent in one piece. Nobody sees the difference, and a small model needs
# less time for a token than the event loop for a wake-up and a chunk.
_GATHER_S = 0.01
_TICK_S = 1.0  # before the first text, the current step is sent once per second


class Waiting(Closing):
    """The jobs of one HTTP request. Use a with statement: its end cancels unfinished jobs."""

    def __init__(self, scheduler: Scheduler, http: HttpRequest, joined: bool = True) -> None:
        """joined: sends waiting text in one piece, not token by token."""
        self._scheduler, self._http, self._join = scheduler, http, joined
        self._told: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._waking = self._left = False
        self._woken = 0.0  # time of the last wake-up of the event loop
        self.jobs: list[Job] = []

    def close(self) -> None:
        """Cancels all unfinished jobs."""
        for job in self.jobs:
            if not job.over:
                self._scheduler.cancel(job)

    def submit(self, request: Request) -> Job:
        """Submits a request to the scheduler. Raises RequestError, StateError."""
        loop, number = asyncio.get_running_loop(), len(self.jobs)

        def emit(event: Event) -> None:
            self._told.append((number, event))
            last = isinstance(event, (Done, Failed))
            if self._waking and not last:
                return
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed because the server has ended
                loop.call_soon_threadsafe(self._wake, last)

        job = self._scheduler.submit(request, emit)
        self.jobs.append(job)
        return job

    def _wake(self, at_once: bool) -> None:
        loop = asyncio.get_running_loop()
        left = self._woken + _GATHER_S - loop.time()
        if left > 0 and not at_once:
            loop.call_later(left, self._wake, True)
            return
        self._waking = False  # set before the events are taken, so that later events wake again
        self._woken = loop.time()
        self._arrived.set()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yields events with the numbers of their jobs, until all jobs end. Joins waiting text into one event.

        Before the first text, repeats the last step every second. Raises a failed job's error, and RequestError if the
        client leaves.
        """
        watch, loop = asyncio.create_task(self._watch()), asyncio.get_running_loop()
        over, doing = 0, (0, Step("waiting", 0.0))
        silent, alarm = True, loop.call_later(_TICK_S, self._arrived.set)
        try:
            while over < len(self.jobs):
                await self._arrived.wait()
                self._arrived.clear()
                alarm.cancel()
                if self._left:
                    raise RequestError(LEFT, "the client closed the connection")
                if silent and not self._told:
                    yield doing
                while self._told:
                    number, event = self._next()
                    if isinstance(event, Failed):
                        raise event.error
                    over += isinstance(event, Done)
                    if isinstance(event, Step):
                        doing = number, event
                    else:
                        silent = False
                    yield number, event
                if silent:
                    alarm = loop.call_later(_TICK_S, self._arrived.set)
        finally:
            alarm.cancel()
            watch.cancel()

    def _next(self) -> tuple[int, Event]:
        number, event = self._told.popleft()
        if isinstance(event, Done) and event.report.finish == "cancelled":
            return number, Failed(CancelledError())  # cancelled by the server: this client is still connected
        while self._told and self._told[0][0] == number and (joined := _joined(event, self._told[0][1])):
            if not self._join and isinstance(event, Text):
                break
            self._told.popleft()
            event = joined
        return number, event

    async def _watch(self) -> None:
        """Records that the client left."""
        await left(self._http)
        self._left = True
        self._arrived.set()


async def left(http: HttpRequest) -> None:
    """Waits until the client leaves."""
    with contextlib.suppress(Exception):
        while (await http.receive())["type"] != "http.disconnect":
            pass


def _joined(event: Event, later: Event) -> Event | None:
    """Joins two events into one if nothing is lost: texts, or two shares of the same step. Else returns None."""
    if isinstance(event, Text) and isinstance(later, Text):
        return Text(event.text + later.text, event.tokens + later.tokens, event.ids + later.ids)
    if isinstance(event, Step) and isinstance(later, Step) and event.what == later.what:
        return later
    return None
