"""What the translations of other wire formats into chat completions share."""

from __future__ import annotations

import json
from typing import Any

from pykvedge.chat.serve import errors
from pykvedge.chat.serve.wire import ChatRequest, parsed
from pykvedge.errors import RequestError

Object = dict[str, Any]


def error(failed: RequestError) -> Object:
    """Writes an error as /v1/messages has it."""
    return {"type": "error", "error": {"type": errors.kind(failed), "message": failed.message}}


def chat_request(fields: Object) -> ChatRequest:
    """Makes the chat request; what a translation got wrong is the client's field all the same."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return parsed(ChatRequest, json.dumps(given).encode())
    except (TypeError, ValueError, RecursionError) as broken:
        raise RequestError(400, f"the body cannot be translated: {broken}", "invalid_json") from None


def event_line(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
