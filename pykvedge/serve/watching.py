"""What a server does now: its memory, its conversations, and both as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from pykvedge.errors import RequestError
from pykvedge.serve.engine import Engine
from pykvedge.serve.guarding import OWNER
from pykvedge.serve.service import Service
from pykvedge.system import memory as process

_LOOK_S = 0.25  # between two looks at what has changed
_QUIET_S = 10.0  # a stream of events that has nothing to say says so after this
_MOST_WATCHERS = 32


async def memory(service: Service, http: HttpRequest) -> Response:
    """GET /v1/kvedge/memory."""
    engine = service.engine
    folder = await asyncio.to_thread(lambda: engine.park.folder_bytes)
    return JSONResponse({**_memory(engine), "folder_bytes": folder})


def _memory(engine: Engine) -> dict[str, Any]:
    return {
        "kv_bytes": engine.kv_bytes(),
        "parked_bytes": engine.park.n_bytes,
        "parked_conversations": len(engine.park),
        "limit_bytes": engine.limits.memory,
        "private_bytes": process.own_bytes(),
        "running": engine.busy,
        "waiting": engine.waiting,
    }


async def sessions(service: Service, http: HttpRequest) -> Response:
    """GET /v1/kvedge/sessions: those that are worked on, then those that wait. Nothing of what was said.

    Whoever showed a key sees the conversations of that key.
    """
    owner = http.scope.get(OWNER, "")
    parked = await asyncio.to_thread(service.engine.park.listed, owner)
    return JSONResponse({"sessions": [*_working(service.engine, owner), *parked]})


def _working(engine: Engine, owner: str) -> list[dict[str, Any]]:
    out = []
    for job, state, slot in engine.working():
        if job.request.owner != owner:
            continue
        tokens, request = job.report.tokens, job.request
        out.append(
            {
                "id": job.id,
                "state": state,
                "since": job.since,
                "method": request.plan.method,
                "budget": request.plan.budget.value,
                "tokens": tokens.prompt + tokens.reused + tokens.generated,
                "generated": tokens.generated,
                "bytes": slot.n_bytes if slot is not None else 0,
                "read": round(slot.share, 4) if slot is not None else 0.0,
            }
        )
    return out


async def forget(service: Service, http: HttpRequest) -> Response:
    """DELETE /v1/kvedge/sessions/ID: gives up an answer, or forgets a conversation that waits, of the same key."""
    name, engine, owner = http.path_params["name"], service.engine, http.scope.get(OWNER, "")
    for job, _, _ in engine.working():
        if job.id == name and job.request.owner == owner:
            engine.cancel(job)
            return JSONResponse({"id": name, "ended": True})
    if await asyncio.to_thread(engine.park.forget, name, owner):
        return JSONResponse({"id": name, "forgotten": True})
    raise RequestError(404, f"there is no conversation {name:.80}", "not_found")


async def events(service: Service, http: HttpRequest) -> Response:
    """GET /v1/kvedge/events: memory and what is worked on, at once and whenever it has changed."""
    if service.watchers >= _MOST_WATCHERS:
        raise RequestError(503, "too many watch this server already", "busy", retry_s=10)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_changes(service, http), media_type="text/event-stream", headers=headers)


async def _changes(service: Service, http: HttpRequest) -> AsyncIterator[str]:
    service.watchers += 1
    try:
        last, said, owner = "", 0.0, http.scope.get(OWNER, "")
        while not service.engine.stopping and not await http.is_disconnected():
            now = json.dumps({"memory": _memory(service.engine), "sessions": _working(service.engine, owner)})
            if now != last:
                yield f"data: {now}\n\n"
                last, said = now, time.monotonic()
            elif time.monotonic() - said > _QUIET_S:
                yield ": nothing new\n\n"
                said = time.monotonic()
            await asyncio.sleep(_LOOK_S)
    finally:
        service.watchers -= 1
