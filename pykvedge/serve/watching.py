"""Reports the present state of a server: memory, conversations, a stream of both, and figures for Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pykvedge.errors import RequestError
from pykvedge.serve.completions import EventStream
from pykvedge.serve.guarding import OWNER
from pykvedge.serve.scheduler import Scheduler
from pykvedge.serve.service import Service
from pykvedge.system import memory as process

_LOOK_S = 0.25  # seconds between two checks for changes
_MAX_WATCHERS = 32


async def memory(service: Service, http: HttpRequest) -> Response:
    scheduler = service.scheduler
    folder = await asyncio.to_thread(lambda: scheduler.park.folder_bytes)
    return JSONResponse({**_memory(scheduler), "folder_bytes": folder})


def _memory(scheduler: Scheduler) -> dict[str, Any]:
    return {
        "kv_bytes": scheduler.kv_bytes(), "kv_file_bytes": scheduler.file_bytes(),
        "parked_bytes": scheduler.park.n_bytes, "parked_conversations": len(scheduler.park),
        "limit_bytes": scheduler.limits.memory, "private_bytes": process.own_bytes(),
        "running": scheduler.busy, "waiting": scheduler.waiting,
    }  # fmt: skip


async def sessions(service: Service, http: HttpRequest) -> Response:
    """GET /v1/kvedge/sessions: the active conversations, then the parked ones; never any text.

    A client sees only the conversations of its key.
    """
    owner = http.scope.get(OWNER, "")
    parked = await asyncio.to_thread(service.scheduler.park.listed, owner)
    return JSONResponse({"sessions": [*_working(service.scheduler, owner), *parked]})


def _working(scheduler: Scheduler, owner: str) -> list[dict[str, Any]]:
    out = []
    for job, state, slot in scheduler.working():
        if job.request.owner != owner:
            continue
        tokens, plan = job.report.tokens, job.request.plan
        n_bytes, file_bytes, share = (slot.n_bytes, slot.file_bytes, slot.share) if slot is not None else (0, 0, 0.0)
        out.append({
            "id": job.id, "state": state, "since": job.since, "method": plan.method, "budget": plan.budget.value,
            "tokens": tokens.prompt + tokens.reused + tokens.generated, "generated": tokens.generated,
            "bytes": n_bytes, "file_bytes": file_bytes, "read": round(share, 4),
        })  # fmt: skip
    return out


async def forget(service: Service, http: HttpRequest) -> Response:
    """DELETE /v1/kvedge/sessions/ID: cancels an answer, or forgets a parked conversation. Only for the same key."""
    name, scheduler, owner = http.path_params["name"], service.scheduler, http.scope.get(OWNER, "")
    for job, _, _ in scheduler.working():
        if job.id == name and job.request.owner == owner:
            scheduler.cancel(job)
            return JSONResponse({"id": name, "ended": True})
    if await asyncio.to_thread(scheduler.park.forget, name, owner):
        return JSONResponse({"id": name, "forgotten": True})
    raise RequestError(404, f"the conversation {name:.80} does not exist", "not_found")


async def events(service: Service, http: HttpRequest) -> Response:
    """GET /v1/kvedge/events: memory and active conversations, at once and after every change."""
    if service.watchers >= _MAX_WATCHERS:
        raise RequestError(503, "too many clients watch this server; try again later", "busy", retry_s=10)
    return EventStream(_changes(service, http))


async def _changes(service: Service, http: HttpRequest) -> AsyncIterator[str]:
    service.watchers += 1
    try:
        last, owner = "", http.scope.get(OWNER, "")
        while not service.scheduler.stopping and not await http.is_disconnected():
            now = json.dumps({"memory": _memory(service.scheduler), "sessions": _working(service.scheduler, owner)})
            if now != last:
                yield f"data: {now}\n\n"
                last = now
            await asyncio.sleep(_LOOK_S)
    finally:
        service.watchers -= 1


def metrics(scheduler: Scheduler) -> bytes:
    """Returns the state and the counters of a server in Prometheus's format."""
    registry = CollectorRegistry()
    registry.register(_Figures(scheduler))
    return generate_latest(registry)


class _Figures:
    """Collects the figures of a scheduler at each request of Prometheus."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics. Prometheus's library appends _total to the names of counters."""
        scheduler, counts = self._scheduler, self._scheduler.counts
        answers = CounterMetricFamily("kvedge_answers", "Number of answers by finish reason.", labels=["finish"])
        for how in ("end", "stop", "length", "context", "cancelled", "error"):
            answers.add_metric([how], counts.finished[how])
        yield answers
        gauges = {
            "requests_waiting": ("Number of waiting requests.", scheduler.waiting),
            "requests_running": ("Number of running requests.", scheduler.busy),
            "kv_bytes": ("Bytes of keys and values of running conversations.", scheduler.kv_bytes()),
            "kv_file_bytes": ("Bytes of the rows of --keep disk of running conversations.", scheduler.file_bytes()),
            "kv_parked_bytes": ("Bytes of keys and values of waiting conversations in memory.", scheduler.park.n_bytes),
            "kv_limit_bytes": ("Limit of kvedge_kv_bytes plus kvedge_kv_parked_bytes.", scheduler.limits.memory),
            "conversations_parked": ("Number of waiting conversations in memory.", len(scheduler.park)),
            "private_bytes": ("Bytes of resident memory that is not shared with files.", process.own_bytes()),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"kvedge_{name}", what, value)
        counters = {
            "requests_refused": "Number of requests refused because the queue was full.",
            "prompt_tokens": "Number of prompt tokens read.",
            "image_tokens": "Number of prompt tokens read that came from images.",
            "pruned_tokens": "Number of image tokens removed by a pruner.",
            "reused_tokens": "Number of prompt tokens reused from waiting conversations.",
            "generated_tokens": "Number of generated tokens.",
            "compressions": "Number of compressed prompts.",
            "kv_full_bytes": "Bytes of keys and values of prompts before compression.",
            "kv_kept_bytes": "Bytes of keys and values of prompts after compression.",
        }
        for name, what in counters.items():
            yield CounterMetricFamily(f"kvedge_{name}", what, counts.sums[name])
        yield SummaryMetricFamily("kvedge_first_token_seconds", "Seconds from a request to its first token.",
                                  counts.sums["first_tokens"], counts.sums["first_token_s"])  # fmt: skip
