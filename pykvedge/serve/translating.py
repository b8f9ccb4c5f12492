"""What the translations of other wire formats into chat completions share."""

from __future__ import annotations

import json
from typing import Any

from pykvedge.errors import RequestError
from pykvedge.serve import errors
from pykvedge.serve.wire import ChatRequest, ImagePart, parsed

Object = dict[str, Any]
_ASIDE, _LARGE = "aside:", 1 << 16  # a URL that stands for another one; characters of one


def error(failed: RequestError) -> Object:
    """Writes an error as /v1/messages has it."""
    return {"type": "error", "error": {"type": errors.kind(failed), "message": failed.message}}


def chat_request(fields: Object) -> ChatRequest:
    """Makes the chat request; what a translation got wrong is the client's field all the same."""
    pictures: list[str] = []
    given = {name: value for name, value in fields.items() if value is not None}
    given["messages"] = [_without_pictures(message, pictures) for message in fields["messages"]]
    try:
        chat: ChatRequest = parsed(ChatRequest, json.dumps(given).encode())
    except (TypeError, ValueError, RecursionError) as broken:
        raise RequestError(400, f"the body cannot be translated: {broken}", "invalid_json") from None
    for part in (part for message in chat.messages for part in message.parts if isinstance(part, ImagePart)):
        if part.url.startswith(_ASIDE):
            part.image_url = pictures[int(part.url[len(_ASIDE) :])]
    return chat


def _without_pictures(message: Object, pictures: list[str]) -> Object:
    """Puts the URLs of large pictures aside, which need not be written as JSON and read again."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if isinstance(url, str) and (len(url) > _LARGE or url.startswith(_ASIDE)):
            pictures.append(url)
            part = {**part, "image_url": f"{_ASIDE}{len(pictures) - 1}"}
        parts.append(part)
    return {**message, "content": parts}


def event_line(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
