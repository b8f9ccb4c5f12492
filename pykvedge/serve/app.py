"""Defines the routes of `kvedge serve`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from pykvedge.errors import RequestError
from pykvedge.library import native_plan
from pykvedge.plans import making, presets
from pykvedge.serve import anthropic, completions, errors, llama, openapi, prompts, responses, watching
from pykvedge.serve.asking import plan_of
from pykvedge.serve.guarding import LOCAL, Guarding, Rules, without_pictures
from pykvedge.serve.service import Service
from pykvedge.serve.wire import ChatRequest, Compression, Wire, parsed
from pykvedge.system.files import DATA

Handler = Callable[..., Awaitable[Response]]  # takes a Service, a request, and its parsed body if the route has one
# files of the page at `/`, served unchanged, and a scene to ask about; the page loads nothing from other servers
_PAGE = Path(__file__).with_name("page_files")
_PAGE_FILES = {"scene.png": DATA / "doctor.png", **{path.relative_to(_PAGE).as_posix(): path
                                                    for path in _PAGE.rglob("*.*")}}  # fmt: skip
_PAGE_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
               ".png": "image/png"}  # fmt: skip
_PAGE_HEADERS = {
    # pictures of a conversation are data: and blob: URLs
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",  # only DOMPurify turns text into HTML
    "Cache-Control": "no-cache",
}


def application(service: Service, rules: Rules) -> Any:
    routes = [
        _route(service, "/health", _health),
        _route(service, "/v1/health", _health),
        _route(service, "/metrics", _metrics),
        _route(service, "/openapi.json", _document),
        _route(service, "/v1/models", _models),
        _route(service, "/v1/models/{name:path}", _model),
        _route(service, "/v1/chat/completions", completions.answer, ChatRequest),
        _route(service, "/v1/chat/completions/input_tokens", _count, ChatRequest),
        _route(service, "/chat/completions/input_tokens", _count, ChatRequest),
        # base URLs without /v1, as llama-server has them
        _route(service, "/chat/completions", completions.answer, ChatRequest),
        _route(service, "/responses", responses.answer, responses.ResponsesRequest),
        _route(service, "/models", _models),
        _route(service, "/v1/responses", responses.answer, responses.ResponsesRequest),
        _route(service, "/v1/messages", anthropic.answer, anthropic.MessagesRequest),
        _route(service, "/v1/messages/count_tokens", anthropic.count, anthropic.CountRequest),
        _route(service, "/v1/completions", prompts.openai, prompts.CompletionRequest),
        _route(service, "/completion", prompts.llama, prompts.LlamaRequest),
        _route(service, "/completions", prompts.llama, prompts.LlamaRequest),
        _route(service, "/props", llama.props),
        _route(service, "/slots", llama.slots),
        _route(service, "/tokenize", llama.tokenize, llama.TokenizeRequest),
        _route(service, "/detokenize", llama.detokenize, llama.DetokenizeRequest),
        _route(service, "/apply-template", llama.apply_template, ChatRequest),
        _route(service, "/v1/kvedge/methods", _methods),
        _route(service, "/v1/kvedge/plan", _plan, method="POST"),
        _route(service, "/v1/kvedge/memory", watching.memory),
        _route(service, "/v1/kvedge/sessions", watching.sessions),
        _route(service, "/v1/kvedge/sessions/{name}", watching.forget, method="DELETE"),
        _route(service, "/v1/kvedge/events", watching.events),
        _route(service, "/", _page),
        _route(service, "/page/{name:path}", _page),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unrouted})
    guarded = Guarding(app, rules)
    if not rules.origins:
        return guarded
    local = LOCAL.pattern if "localhost" in rules.origins else None
    return CORSMiddleware(guarded, rules.origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",),
                          allow_origin_regex=local, expose_headers=("Retry-After",))  # fmt: skip


def _route(service: Service, path: str, handler: Handler, body: type[Wire] | None = None, method: str = "GET") -> Route:
    """Makes a route. body: type of the parsed body, which makes the route a POST."""

    async def endpoint(http: HttpRequest) -> Response:
        try:
            given = [parsed(body, await http.body())] if body is not None else []
            return await handler(service, http, *given)
        except Exception as error:
            return errors.response(errors.of(error), path.startswith("/v1/messages"))

    return Route(path, endpoint, methods=["POST" if body is not None else method])


async def _unrouted(http: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = f"{http.url.path:.100}"
    what = {404: f"the path {path} does not exist", 405: f"{path} does not allow the method {http.method:.20}"}
    response = errors.response(
        RequestError(status, what.get(status, "the server cannot answer this request"), "not_found")
    )
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)  # Allow, as RFC 9110 requires
    return response


async def _count(service: Service, http: HttpRequest, given: ChatRequest) -> Response:
    return JSONResponse({"input_tokens": await completions.count(service, http, given)})


async def _health(service: Service, http: HttpRequest) -> Response:
    return JSONResponse({"status": "ok", "model": service.name, "uptime_s": round(time.time() - service.began, 1)})


async def _metrics(service: Service, http: HttpRequest) -> Response:
    return Response(watching.metrics(service.scheduler), media_type="text/plain; version=0.0.4")


async def _document(service: Service, http: HttpRequest) -> Response:
    return JSONResponse(openapi.document())


async def _models(service: Service, http: HttpRequest) -> Response:
    return JSONResponse({"object": "list", "data": [_described(service)], "models": [llama.capabilities(service)]})


async def _model(service: Service, http: HttpRequest) -> Response:
    name = http.path_params["name"]
    if name != service.name:
        raise service.other_model(name)
    return JSONResponse(_described(service))


def _described(service: Service) -> dict[str, Any]:
    limits, plan = service.scheduler.limits, service.defaults.plan
    about = {
        "n_ctx": limits.n_ctx,
        "images": service.scheduler.preparer.vision is not None,
        "tools_in_template": service.defaults.knows_tools,
        "method": plan.method,
        "budget": plan.budget.value,
        "kv_bytes_per_token": service.scheduler.preparer.bytes_per_token,
        "packaged": service.scheduler.loan.model.location.is_relative_to(DATA),  # it knows drawn scenes only
    }
    return {"id": service.name, "object": "model", "created": int(service.began), "owned_by": "kvedge",
            **llama.about_model(service), "kvedge": about}  # fmt: skip


async def _methods(service: Service, http: HttpRequest) -> Response:
    """Answers with the methods that this model can follow, and with the reason for each other method."""
    why, names = service.scheduler.preparer.why_no_replay(), sorted(presets.methods())
    barred = {name: f"the method needs a second pass over the prompt: {why}" for name in names
              if why and native_plan.replays(making.plan(name))}  # fmt: skip
    methods = [name for name in names if name not in barred]
    default = json.loads(service.defaults.plan.to_json())
    summaries = {name: presets.preset(name).summary for name in names}
    return JSONResponse({"default": default, "methods": methods, "unavailable": barred, "summaries": summaries})


async def _plan(service: Service, http: HttpRequest) -> Response:
    without_pictures(http.scope)
    given = parsed(Compression, await http.body() or b"{}")
    return JSONResponse(json.loads((await asyncio.to_thread(plan_of, given, service.defaults.plan)).to_json()))


async def _page(service: Service, http: HttpRequest) -> Response:
    name = http.path_params.get("name", "index.html")
    path = _PAGE_FILES.get(name)
    if path is None:
        raise RequestError(404, f"the page has no file {name:.80}", "not_found")
    kind = _PAGE_KINDS.get(path.suffix, "application/octet-stream")
    return FileResponse(path, media_type=kind, headers=_PAGE_HEADERS)
