"""The state shared by all routes of a server: the scheduler, and the limits for parsing requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from pykvedge.errors import RequestError
from pykvedge.serve import asking
from pykvedge.serve.errors import LEFT
from pykvedge.serve.fetching import Fetching
from pykvedge.serve.guarding import OWNER, PICTURES, TEXT
from pykvedge.serve.job import Request
from pykvedge.serve.scheduler import Scheduler
from pykvedge.serve.waiting import left
from pykvedge.serve.wire import ChatRequest, Prompted

_QUICK = 100_000  # bytes outside pictures: smaller requests are parsed without a thread
_QUICK_PICTURES = 4 << 20  # bytes of pictures: smaller requests are parsed without a thread
MAX_DOCUMENTS = 8  # most requests with documents at the same time
_SLACK = 1 << 16  # bytes of a body that may look like pictures without being pictures

T = TypeVar("T")


@dataclass
class Service:
    """A scheduler under a name. fingerprint: identifies program version and model for clients."""

    scheduler: Scheduler
    defaults: asking.Defaults
    name: str
    fingerprint: str
    strict: bool = False  # refuse requests that name another model
    watchers: int = 0  # clients that watch events
    began: float = field(default_factory=time.time)
    parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))  # parsed in threads
    drawing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # with documents
    documents: int = 0  # requests whose documents are drawn or wait
    fetching: Fetching = field(default_factory=Fetching)
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # set when the server ends and takes no more requests

    def check_model(self, name: str | None) -> None:
        """Raises RequestError for the name of another model, if the server is strict."""
        if self.strict and name and self.name not in (name, name.rpartition("@")[0]):
            raise self.other_model(name)

    def other_model(self, name: str) -> RequestError:
        """Returns the error for the name of another model."""
        why = f"the model '{name:.80}' does not exist on this server; use {self.name}"
        return RequestError(404, why, "model_not_found", "model")


async def parsed_requests(service: Service, http: HttpRequest, *given: ChatRequest | Prompted) -> list[Request]:
    """Translates a body's requests for the scheduler. Raises RequestError, ImageError, UsageError."""
    seen = sum(len(url) for one in given for url in asking.pictures_of(one))
    if http.scope.get(PICTURES, 0) > seen + seen // 8 + _SLACK:
        raise RequestError(413, "the body has data: URLs that are not pictures; remove them", "too_large")
    return [await _parsed_request(service, http, one) for one in given]


async def _parsed_request(service: Service, http: HttpRequest, given: ChatRequest | Prompted) -> Request:
    owner, urls = http.scope.get(OWNER, ""), asking.pictures_of(given)
    defaults = replace(service.defaults, sources=replace(service.defaults.sources, owner=owner))

    def made() -> Request:
        return service.scheduler.preparer.measured(asking.request_of(given, defaults))

    little = http.scope.get(TEXT, 0) <= _QUICK and http.scope.get(PICTURES, 0) <= _QUICK_PICTURES
    if little and asking.is_quick(given, defaults):
        request = made()
    else:
        if elsewhere := [url for url in urls if defaults.sources.is_elsewhere(url)]:
            fetched = await _while_wanted(service, http, service.fetching.all(elsewhere))
            defaults = replace(defaults, sources=replace(defaults.sources, fetched=fetched))
        if asking.has_documents(given):
            if service.documents >= MAX_DOCUMENTS:
                raise RequestError(503, "too many requests wait for PDF pages; try again later", "busy", retry_s=5)
            stop = threading.Event()
            defaults = replace(defaults, sources=replace(defaults.sources, stop=stop))
            service.documents += 1
            try:
                async with service.drawing:
                    request = await _while_wanted(service, http, asyncio.to_thread(made))
            finally:
                service.documents -= 1
                stop.set()  # stops the drawing if the client left
        else:
            async with service.parsing:
                request = await asyncio.to_thread(made)
    return replace(request, owner=owner)


async def _while_wanted(service: Service, http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """Returns the work's result. Cancels it and raises RequestError if the client leaves or the server ends."""
    task, gone, closing = (asyncio.ensure_future(one) for one in (work, left(http), service.closing.wait()))
    try:
        await asyncio.wait((task, gone, closing), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if closing.done():
            raise RequestError(
                503, "the server is shutting down and accepts no more requests", "unavailable", retry_s=5
            )
        raise RequestError(LEFT, "the client closed the connection")
    finally:
        for one in (task, gone, closing):
            one.cancel()
        await asyncio.gather(task, gone, closing, return_exceptions=True)
