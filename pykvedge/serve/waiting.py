"""A request waits for its jobs here: events come from the scheduler's threads; a client that leaves ends its jobs."""

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

# Text that comes sooner than this after the last is gathered and told in one piece: nobody sees the difference, and a
# small model computes a token in less time than it takes to wake the event loop and write a chunk.
_GATHER_S = 0.01
_TICK_S = 1.0  # before the first text, what is done is told so often


class Waiting(Closing):
    """The jobs of one HTTP request. Use it in a with statement: what is not done by its end is given up."""

    def __init__(self, scheduler: Scheduler, http: HttpRequest, joined: bool = True) -> None:
        """joined: text that waits is told in one piece, not token by token."""
        self._scheduler, self._http, self._join = scheduler, http, joined
        self._told: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._waking = self._left = False
        self._woken = 0.0  # when the event loop last looked
        self.jobs: list[Job] = []

    def close(self) -> None:
        """Gives up what is not done."""
        for job in self.jobs:
            if not job.over:
                self._scheduler.cancel(job)

    def submit(self, request: Request) -> Job:
        """Hands a request to the scheduler. Raises RequestError, StateError."""
        loop, number = asyncio.get_running_loop(), len(self.jobs)

        def emit(event: Event) -> None:
            self._told.append((number, event))
            last = isinstance(event, (Done, Failed))
            if self._waking and not last:
                return
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has gone down
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
        self._waking = False  # before anything is taken: what is appended from now on wakes again
        self._woken = loop.time()
        self._arrived.set()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yields events with the number of their job, until all jobs are over; text that waits, in one piece.

        Until there is text, the last step is told again each second. Raises what a job failed with, and RequestError
        where the client left.
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
                    raise RequestError(LEFT, "the client left")
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
            return number, Failed(CancelledError())  # not by this client, who is there
        while self._told and self._told[0][0] == number and (joined := _joined(event, self._told[0][1])):
            if not self._join and isinstance(event, Text):
                break
            self._told.popleft()
            event = joined
        return number, event

    async def _watch(self) -> None:
        """Notes that the client left."""
        await left(self._http)
        self._left = True
        self._arrived.set()


async def left(http: HttpRequest) -> None:
    """Waits until the client leaves."""
    with contextlib.suppress(Exception):
        while (await http.receive())["type"] != "http.disconnect":
            pass


def _joined(event: Event, later: Event) -> Event | None:
    """Makes one event of two, where nobody misses the first: text goes on, a step has come further."""
    if isinstance(event, Text) and isinstance(later, Text):
        return Text(event.text + later.text, event.tokens + later.tokens, event.ids + later.ids)
    if isinstance(event, Step) and isinstance(later, Step) and event.what == later.what:
        return later
    return None
