"""Describes the server as an OpenAPI document, made from the pydantic models of the requests."""

from __future__ import annotations

from typing import Any

from pykvedge.serve.anthropic import CountRequest, MessagesRequest
from pykvedge.serve.llama import DetokenizeRequest, TokenizeRequest
from pykvedge.serve.prompts import CompletionRequest, LlamaRequest
from pykvedge.serve.responses import ResponsesRequest
from pykvedge.serve.wire import ChatRequest, Compression, Wire
from pykvedge.system.version import package_version

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, tuple[type[Wire], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation; stream: true for chunks as they come."),
    "/v1/responses": (ResponsesRequest, "The same in the form of the responses interface; nothing is stored."),
    "/v1/messages": (MessagesRequest, "The same in the form of the messages interface."),
    "/v1/messages/count_tokens": (CountRequest, "How many tokens a prompt has."),
    "/v1/completions": (CompletionRequest, "Go on with a prompt that no chat template is put around."),
    "/completion": (LlamaRequest, "The same, as llama-server has it."),
    "/tokenize": (TokenizeRequest, "The tokens of a text."),
    "/detokenize": (DetokenizeRequest, "The text of tokens."),
    "/apply-template": (ChatRequest, "The prompt that a conversation becomes."),
    "/v1/kvedge/plan": (Compression, "The plan that these choices make."),
}
_READ = {
    "/health": "Whether the server is there.",
    "/metrics": "Figures, as Prometheus reads them.",
    "/v1/models": "The model of this server.",
    "/props": "The model, its template, and what holds where a request says nothing.",
    "/slots": "Who is answered now.",
    "/v1/kvedge/methods": "The methods, and the plan of requests that choose none.",
    "/v1/kvedge/memory": "Keys and values in memory now.",
    "/v1/kvedge/sessions": "Conversations that are worked on, and those that wait.",
}
_STATUS = {400: "wrong request", 401: "no valid key", 403: "not allowed", 404: "not there", 408: "too slow",
           409: "no conversation to go on from", 413: "too large",
           503: "too busy: try again after Retry-After seconds"}  # fmt: skip


def document() -> dict[str, Any]:
    """Returns an OpenAPI 3.1 document. Omits /v1/kvedge/events: a client that tries every route would wait forever."""
    schemas: dict[str, Any] = {"Error": _error()}
    paths: dict[str, Any] = {}
    for path, (model, what) in _BODIES.items():
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
        content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
        body = {"required": path != "/v1/kvedge/plan", "content": content}
        paths[path] = {"post": {"summary": what, "requestBody": body, "responses": _responses(path)}}
    for path, what in _READ.items():
        paths[path] = {"get": {"summary": what, "responses": _responses(path)}}
    named = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    forgotten = {"summary": "Give up an answer, or forget a conversation that waits.", "parameters": [named]}
    paths["/v1/kvedge/sessions/{id}"] = {"delete": {**forgotten, "responses": _responses("/v1/kvedge/sessions")}}
    info = {"title": "kvedge", "version": package_version(), "description": "Vision-language models in less memory."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _responses(path: str) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else "application/json"
    good: dict[str, Any] = {"description": "the answer", "content": {kind: {}}}
    if path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/completion"):
        good["content"]["text/event-stream"] = {}
    wrong = {"$ref": _REF.format(model="Error")}
    bad = {str(s): {"description": w, "content": {"application/json": {"schema": wrong}}} for s, w in _STATUS.items()}
    return {"200": good, **bad}


def _error() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    return {"type": "object", "properties": {"error": {"type": "object", "properties": fields}}, "required": ["error"]}
