"""What the translations of other wire formats into chat completions share."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from pykvedge.chat.serve import errors
from pykvedge.chat.serve.wire import MOST_PARTS, ChatRequest, parsed
from pykvedge.errors import RequestError

Object = dict[str, Any]
Parts = Annotated[list[Object], Field(max_length=MOST_PARTS)]


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


def text_of(part: Object) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(400, "a part of type text without a text", "invalid_value")
    return text


def joined(content: Any) -> str:
    """Joins text that may be given in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(400, "text is a string, or a list of parts", "invalid_value")
    return "\n".join(text_of(part) for part in content if "text" in part)


def event_line(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
