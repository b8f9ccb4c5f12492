"""POST /v1/responses: OpenAI's newer wire format, as a translation of chat completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pykvedge.chat.serve import errors
from pykvedge.chat.serve import tools as calling
from pykvedge.chat.serve.completions import Events, asked, begun, complete, streamed, usage
from pykvedge.chat.serve.job import Done, Failed, Text
from pykvedge.chat.serve.service import Service
from pykvedge.chat.serve.translating import Object, chat_request, event_line
from pykvedge.chat.serve.waiting import Waiting
from pykvedge.chat.serve.wire import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    ChatRequest,
    Compression,
    Count,
    RefusalPart,
    Share,
    Temperature,
    Wire,
    parsed,
)
from pykvedge.errors import RequestError
from pykvedge.runtime.report import Report


class InputText(Wire):
    """Text; `output_text` is what an answer's is called."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(Wire):
    """A picture."""

    type: Literal["input_image"]
    image_url: str


_Part = Annotated[InputText | InputImage | RefusalPart, Field(discriminator="type")]
_Parts = Annotated[list[_Part], Field(max_length=MOST_PARTS)]


class MessageItem(Wire):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class CallItem(Wire):
    """A call that the assistant made; arguments are JSON as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"


class CallOutputItem(Wire):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


_Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(lambda item: item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)),
]


class ResponsesRequest(Wire):
    """The body of POST /v1/responses. Nothing is stored: earlier messages come with the request."""

    model: str | None = None
    input: str | Annotated[list[_Item], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    tools: Annotated[list[Object], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    text: Object | None = None
    previous_response_id: str | None = None
    kvedge: Compression | None = None


async def answer(service: Service, http: HttpRequest) -> Response:
    """Answers POST /v1/responses."""
    given = parsed(ResponsesRequest, await http.body())
    if given.previous_response_id is not None:
        why = "previous_response_id: nothing is stored here; send the whole conversation"
        raise RequestError(400, why, "unsupported", "previous_response_id")
    chat = _of_responses(given)
    waiting = await asked(service, http, chat)
    if given.stream:
        return streamed(_response_events(service, chat, waiting, await begun(waiting)))
    return JSONResponse(_response(service, chat, (await complete(waiting))[0].report))


def _of_responses(given: ResponsesRequest) -> ChatRequest:
    said: list[Object] = [{"role": "system", "content": given.instructions}] if given.instructions else []
    if isinstance(given.input, str):
        said.append({"role": "user", "content": given.input})
    else:
        said += [_said(item) for item in given.input]
    tools = [
        {"type": "function", "function": {name: tool.get(name) for name in ("name", "description", "parameters")}}
        for tool in given.tools or []
        if tool.get("type") == "function"
    ]
    choice: Any = given.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": str(choice.get("name", ""))}}
    form = (given.text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}
    kvedge = given.kvedge.model_dump(exclude_none=True) if given.kvedge is not None else None
    same = {name: getattr(given, name) for name in ("model", "stream", "temperature", "top_p")}
    return chat_request({**same, "messages": said, "max_tokens": given.max_output_tokens, "tools": tools or None,
                         "tool_choice": choice, "response_format": form, "kvedge": kvedge})  # fmt: skip


def _said(item: MessageItem | CallItem | CallOutputItem) -> Object:
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]}
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _parts(item.output)}
    return {"role": item.role, "content": _parts(item.content)}


def _parts(content: str | list[InputText | InputImage | RefusalPart]) -> str | list[Object]:
    return content if isinstance(content, str) else [_shown(part) for part in content]


def _shown(part: InputText | InputImage | RefusalPart) -> Object:
    if isinstance(part, InputText):
        return {"type": "text", "text": part.text}
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": part.image_url}
    return part.model_dump()


def _response_head(service: Service, number: str, status: str) -> Object:
    return {
        "id": number, "object": "response", "created_at": int(time.time()), "status": status, "model": service.name,
        "output": [], "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
        "parallel_tool_calls": True, "temperature": None, "tool_choice": "auto", "tools": [], "top_p": None,
        "usage": None, "previous_response_id": None, "store": False,
    }  # fmt: skip


def _output(chat: ChatRequest, report: Report, number: str) -> list[Object]:
    text, calls = (
        calling.calls_in(report.text, chat.tools) if chat.tools and chat.tool_choice != "none" else (report.text, [])
    )
    out: list[Object] = []
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": []}
        out.append({"type": "message", "id": number, "role": "assistant", "status": "completed", "content": [part]})
    for call in calls:
        out.append({"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call["id"],
                    "status": "completed", **call["function"]})  # fmt: skip
    return out


def _response(service: Service, chat: ChatRequest, report: Report, number: str = "", item: str = "") -> Object:
    cut = report.finish in ("length", "context")
    head = _response_head(service, number or f"resp_{secrets.token_hex(12)}", "incomplete" if cut else "completed")
    counts = usage([report])
    counted = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": report.tokens.reused},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
    why = {"reason": "max_output_tokens"} if cut else None
    output = _output(chat, report, item or f"msg_{secrets.token_hex(12)}")
    return {**head, "output": output, "incomplete_details": why, "usage": counted}


async def _response_events(service: Service, chat: ChatRequest, waiting: Waiting, events: Events) -> AsyncIterator[str]:
    number, item, count = f"resp_{secrets.token_hex(12)}", f"msg_{secrets.token_hex(12)}", 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal count
        count += 1
        return event_line(kind, sequence_number=count - 1, **fields)

    where: Object = {"item_id": item, "output_index": 0, "content_index": 0}
    message: Object = {"type": "message", "id": item, "role": "assistant", "status": "in_progress", "content": []}
    live = not chat.tools or chat.tool_choice == "none"
    with waiting:
        yield event("response.created", response=_response_head(service, number, "in_progress"))
        yield event("response.in_progress", response=_response_head(service, number, "in_progress"))
        try:
            if live:
                yield event("response.output_item.added", output_index=0, item=message)
                part: Object = {"type": "output_text", "text": "", "annotations": []}
                yield event("response.content_part.added", **where, part=part)
            async for _, happened in events:
                if isinstance(happened, Failed):
                    raise happened.error
                if isinstance(happened, Text) and live and happened.text:
                    yield event("response.output_text.delta", **where, delta=happened.text, logprobs=[])
                if isinstance(happened, Done):
                    made = _response(service, chat, happened.report, number, item)
                    if live:
                        text = made["output"][0]["content"][0]
                        yield event("response.output_text.done", **where, text=text["text"], logprobs=[])
                        yield event("response.content_part.done", **where, part=text)
                    for i, done in enumerate(made["output"]):
                        if not live:
                            yield event("response.output_item.added", output_index=i, item=done)
                        yield event("response.output_item.done", output_index=i, item=done)
                    kind = "response.incomplete" if made["incomplete_details"] else "response.completed"
                    yield event(kind, response=made)
        except Exception as failed:
            wrong = errors.of(failed)
            yield event("error", code=wrong.code, message=wrong.message, param=wrong.param)
