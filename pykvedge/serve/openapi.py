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
    "/v1/chat/completions": (ChatRequest, "Answer a conversation. With stream: true the answer comes in chunks."),
    "/v1/responses": (
        ResponsesRequest,
        "Answer a conversation in the form of OpenAI's Responses API. Nothing is stored.",
    ),
    "/v1/messages": (MessagesRequest, "Answer a conversation in the form of Anthropic's Messages API."),
    "/v1/messages/count_tokens": (CountRequest, "Count the tokens of a prompt."),
    "/v1/completions": (CompletionRequest, "Complete a prompt without a chat template."),
    "/completion": (LlamaRequest, "Complete a prompt in the form of llama-server."),
    "/tokenize": (TokenizeRequest, "Return the tokens of a text."),
    "/detokenize": (DetokenizeRequest, "Return the text of tokens."),
    "/apply-template": (ChatRequest, "Return the prompt that the chat template makes of a conversation."),
    "/v1/kvedge/plan": (Compression, "Return the plan of these settings."),
}
_READ = {
    "/health": "Return whether the server is ready.",
    "/metrics": "Return metrics in the format of Prometheus.",
    "/v1/models": "Return the model of this server.",
    "/props": "Return the model, its chat template, and the default settings of a request.",
    "/slots": "Return the running requests.",
    "/v1/kvedge/methods": "Return the methods, and the default plan.",
    "/v1/kvedge/memory": "Return the memory of keys and values.",
    "/v1/kvedge/sessions": "Return the running and the waiting conversations.",
}
_STATUS = {400: "invalid request", 401: "no valid key", 403: "not allowed", 404: "not found", 408: "too slow",
           409: "unknown conversation", 413: "too large",
           503: "busy: try again after Retry-After seconds"}  # fmt: skip


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
    forgotten = {"summary": "Stop an answer, or delete a waiting conversation.", "parameters": [named]}
    paths["/v1/kvedge/sessions/{id}"] = {"delete": {**forgotten, "responses": _responses("/v1/kvedge/sessions")}}
    info = {
        "title": "kvedge",
        "version": package_version(),
        "description": "Vision-language models with a compressed KV cache.",
    }
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
