"""Rewrites tool results and later system messages for chat templates that cannot write them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from pykvedge.errors import ModelError
from pykvedge.models.images import Picture
from pykvedge.models.prompt import IMAGE, PLACE, ChatTemplate, Message, escaped

ToolAdapter = Callable[[list[Message]], list[Message]]
_ID = "call00000"  # some templates require nine letters and digits


def tool_adapter(template: ChatTemplate, marker: str) -> ToolAdapter:
    """Returns the way to give tool calls and results to a template, found by rendering a short conversation.

    `list` (unchanged): the template writes calls, results, and `marker` inside of a result. `pictures_behind`: the
    template loses the marker, so pictures move behind the results. `as_text`: the template knows no tools.
    """
    called, result = secrets.token_hex(8), secrets.token_hex(8)
    call = {"id": _ID, "type": "function", "function": {"name": called, "arguments": {}}}
    told = [Message("user", "?"), Message("assistant", "", fields={"tool_calls": [call]}),
            Message("tool", f"{result} {marker}", fields={"tool_call_id": _ID, "name": called})]  # fmt: skip
    try:
        text = template.first(told, marker)
    except ModelError:
        return as_text
    if called not in text or result not in text:
        return as_text
    return list if marker in text else pictures_behind


def pictures_behind(messages: list[Message]) -> list[Message]:
    """Moves pictures out of results into a user message after them. The text keeps numbers in their places.

    messages: each picture has a place in its text (`IMAGE`).
    """
    out, moved, n = list[Message](), dict[int, Picture](), 0
    for message in messages:
        if message.role == "tool" and message.pictures:
            own = dict(enumerate(message.pictures, n + 1))
            moved |= own
            message = Message("tool", _numbered(message.text, list(own)), fields=message.fields)
            n += len(own)
        elif message.role != "tool":
            n += len(message.pictures)
            _show(moved, out)
        _append(message, out)
    _show(moved, out)
    return out


def as_text(messages: list[Message]) -> list[Message]:
    """Turns tool calls into text, and tool results into user messages.

    messages: each picture has a place in its text (`IMAGE`).
    """
    out, names = list[Message](), dict[str, str]()
    for message in messages:
        calls = message.fields.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if message.role == "tool":
            name = message.fields.get("name") or names.get(message.fields.get("tool_call_id", ""), "")
            text = message.text if message.pictures else escaped(message.text)
            message = Message("user", f"Result{f' of {escaped(name)}' if name else ''}: {text}", message.pictures)
        elif calls:
            told = [json.dumps(_function(call), ensure_ascii=False) for call in calls]
            message = Message(message.role, "\n".join([message.text, *told] if message.text else told))
        _append(message, out)
    return out


def later_systems_as_text(messages: list[Message]) -> list[Message]:
    """Turns system messages that do not begin the conversation into user messages."""
    out = list[Message]()
    for i, message in enumerate(messages):
        later = message.role == "system" and i > 0
        _append(Message("user", escaped(message.text)) if later else message, out)
    return out


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function of a call, with arguments parsed if they are JSON as text."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
    return function


def _numbered(text: str, numbers: list[int]) -> str:
    """Replaces the places of pictures by numbers, as plain text."""
    left = iter(numbers)
    return PLACE.sub(lambda found: f"(image {next(left)})" if found[0] == IMAGE else IMAGE, text)


def _show(moved: dict[int, Picture], out: list[Message]) -> None:
    """Appends a message with the moved pictures, if any, and empties `moved`."""
    if moved:
        out.append(Message("user", "\n".join(f"Image {n}: {IMAGE}" for n in moved), list(moved.values())))
        moved.clear()


def _append(message: Message, out: list[Message]) -> None:
    """Appends a message. Two user messages in a row are joined, because many templates require alternation."""
    if message.role == "user" and out and out[-1].role == "user":
        before = out.pop()
        message = Message("user", f"{before.text}\n{message.text}", [*before.pictures, *message.pictures])
    out.append(message)
