"""Turns errors into error responses of the wire format, with the right HTTP status."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from pykvedge.errors import (
    CancelledError,
    ContextError,
    ImageError,
    KvedgeError,
    ModelError,
    NothingToCompressError,
    OutOfMemoryError,
    RequestError,
    StateError,
    UsageError,
    lacking,
    one_line,
)

TOO_LONG = "context_length_exceeded"
LEFT = 499  # HTTP status of a request whose client left


def kind(error: RequestError) -> str:
    """Returns the error type of OpenAI's interface."""
    if error.code == TOO_LONG:
        return "exceed_context_size_error"  # llama-server's type
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")


def body(error: RequestError) -> dict[str, Any]:
    about = {"message": error.message, "type": kind(error), "param": error.param, "code": error.code}
    return {"error": {**about, **error.figures}}


def response(error: RequestError, anthropic: bool = False) -> JSONResponse:
    """Returns the response for an error. anthropic: in the form of /v1/messages."""
    headers = {"Retry-After": str(error.retry_s)} if error.retry_s else {}
    return JSONResponse(anthropic_body(error) if anthropic else body(error), error.status, headers)


def wrong(field: str, why: str) -> RequestError:
    """Returns the error for an invalid field of a request, or for a place in a field, such as messages.3."""
    return RequestError(400, f"{field}: {why}", "invalid_value", field.partition(".")[0])


def of(error: Exception) -> RequestError:
    """Returns the response error for any exception that a request caused."""
    if isinstance(error, RequestError):
        return error
    text = one_line(error)
    if isinstance(error, ContextError):
        refused = RequestError(400, text, TOO_LONG, "messages")
        refused.figures = {"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_ctx} if error.n_ctx else {}
        return refused
    if isinstance(error, ImageError):
        return RequestError(400, text, "invalid_image", "messages")
    if isinstance(error, CancelledError):
        return RequestError(503, "the answer was stopped, because the server is shutting down", "cancelled", retry_s=5)
    if isinstance(error, StateError):
        return RequestError(503, text, "unavailable", retry_s=5)
    lacks = text if isinstance(error, OutOfMemoryError) else lacking(error)
    if lacks:
        return RequestError(503, lacks, "out_of_memory", retry_s=5)
    if isinstance(error, (UsageError, NothingToCompressError, ModelError)):
        return RequestError(400, text, "invalid_value")
    if isinstance(error, KvedgeError):
        return RequestError(500, text)
    return RequestError(500, f"unexpected {type(error).__name__}: {text}")


def anthropic_body(failed: RequestError) -> dict[str, Any]:
    """Returns the body of an error in the form of /v1/messages."""
    return {"type": "error", "error": {"type": kind(failed), "message": failed.message}}
