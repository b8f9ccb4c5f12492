"""POST /v1/messages: Anthropic's wire format, as a translation of chat completions."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pykvedge.chat.serve import errors
from pykvedge.chat.serve import tools as calling
from pykvedge.chat.serve.completions import Events, asked, begun, complete, streamed, usage, words
from pykvedge.chat.serve.job import Done, Failed, Text
from pykvedge.chat.serve.service import Service
from pykvedge.chat.serve.translating import Object, chat_request, error, event_line
from pykvedge.chat.serve.waiting import Waiting
from pykvedge.chat.serve.wire import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    ChatRequest,
    Compression,
    Count,
    Limit,
    Share,
    Temperature,
    Wire,
    parsed,
)
from pykvedge.runtime.report import Report


class TextBlock(Wire):
    type: Literal["text"]
    text: str


class Base64Source(Wire):
    type: Literal["base64"]
    media_type: str = "image/png"
    data: str


class UrlSource(Wire):
    type: Literal["url"]
    url: str


class ImageBlock(Wire):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ToolUseBlock(Wire):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[Object, Field(default_factory=dict)]


class ToolResultBlock(Wire):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_Shown], Field(max_length=MOST_PARTS)] | None = None


class ThinkingBlock(Wire):
    """What the assistant thought before an earlier answer; templates leave it out, and so does the translation."""

    type: Literal["thinking", "redacted_thinking"]


_Shown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]
_Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")
]


class AnthropicMessage(Wire):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[_Block], Field(max_length=MOST_PARTS)]


class AnthropicTool(Wire):
    name: str
    description: str | None = None
    input_schema: Object | None = None


class AnthropicChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class CountRequest(Wire):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(max_length=MOST_PARTS)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    kvedge: Compression | None = None


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Limit | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None


async def answer(service: Service, http: HttpRequest) -> Response:
    """Answers POST /v1/messages."""
    given = parsed(MessagesRequest, await http.body())
    chat = _of_messages(given)
    waiting = await asked(service, http, chat)
    if given.stream:
        return streamed(_message_events(service, chat, waiting, await begun(waiting)))
    report = (await complete(waiting))[0].report
    return JSONResponse(_message(service, chat, report))


async def count(service: Service, http: HttpRequest) -> Response:
    """Answers POST /v1/messages/count_tokens: what a prompt has, with the tokens of its pictures that would be read."""
    given = parsed(CountRequest, await http.body())
    waiting = await asked(service, http, _of_messages(MessagesRequest(**dict(given), max_tokens=1)), count_only=True)
    return JSONResponse({"input_tokens": (await complete(waiting))[0].report.tokens.prompt})


def _of_messages(given: MessagesRequest) -> ChatRequest:
    out: list[Object] = []
    if given.system is not None:
        system = given.system if isinstance(given.system, str) else [_shown(block) for block in given.system]
        out.append({"role": "system", "content": system})
    for message in given.messages:
        out += _turns(message)
    choice: Any = None
    if given.tool_choice is not None:
        named = {"type": "function", "function": {"name": given.tool_choice.name or ""}}
        choice = {"auto": "auto", "any": "required", "none": "none", "tool": named}[given.tool_choice.type]
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.input_schema}}
        for t in given.tools or []
    ]
    plain = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
    kvedge = given.kvedge.model_dump(exclude_none=True) if given.kvedge is not None else None
    same = {name: getattr(given, name) for name in plain}
    return chat_request({**same, "messages": out, "stop": given.stop_sequences, "tools": tools or None,
                         "tool_choice": choice, "kvedge": kvedge})  # fmt: skip


def _turns(message: AnthropicMessage) -> list[Object]:
    """Makes the messages that one is in chat completions: results of tools are messages, and come first."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts, calls, results = list[Object](), list[Object](), list[Object]()
    for block in message.content:
        if isinstance(block, (TextBlock, ImageBlock)):
            parts.append(_shown(block))
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            inside = block.content
            content = [_shown(one) for one in inside] if isinstance(inside, list) else inside or ""
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    own: list[Object] = []
    if parts or calls:
        own = [{"role": message.role, "content": parts, **({"tool_calls": calls} if calls else {})}]
    return [*results, *own]


def _shown(block: TextBlock | ImageBlock) -> Object:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _stop_reason(report: Report, called: bool) -> str:
    if called:
        return "tool_use"
    return {"length": "max_tokens", "context": "max_tokens", "stop": "stop_sequence"}.get(report.finish, "end_turn")


def _blocks(chat: ChatRequest, report: Report) -> tuple[list[Object], bool]:
    text, calls = (
        calling.calls_in(report.text, chat.tools) if chat.tools and chat.tool_choice != "none" else (report.text, [])
    )
    blocks: list[Object] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        name, given = call["function"]["name"], calling.arguments_of(call)
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return blocks, bool(calls)


def _counted(report: Report) -> Object:
    counts = usage([report])
    return {
        "input_tokens": counts["prompt_tokens"] - report.tokens.reused,
        "cache_read_input_tokens": report.tokens.reused,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
    }


def _message(service: Service, chat: ChatRequest, report: Report) -> Object:
    blocks, called = _blocks(chat, report)
    return {**_message_head(service), "content": blocks, "stop_reason": _stop_reason(report, called),
            "stop_sequence": None, "usage": _counted(report)}  # fmt: skip


def _message_head(service: Service) -> Object:
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": service.name}


async def _message_events(service: Service, chat: ChatRequest, waiting: Waiting, events: Events) -> AsyncIterator[str]:
    with waiting:
        try:
            live, started = not chat.tools or chat.tool_choice == "none", False
            async for _, event in words(events):
                if isinstance(event, Failed):
                    raise event.error
                if not started:  # what the prompt has is known now
                    started = True
                    usage_ = {**_counted(waiting.jobs[0].report), "output_tokens": 0}
                    ends = {"stop_reason": None, "stop_sequence": None}
                    yield event_line("message_start", message={**_message_head(service), "content": [], **ends,
                                                               "usage": usage_})  # fmt: skip
                    if live:
                        yield event_line("content_block_start", index=0, content_block={"type": "text", "text": ""})
                if isinstance(event, Text) and live and event.text:
                    yield event_line("content_block_delta", index=0, delta={"type": "text_delta", "text": event.text})
                if isinstance(event, Done):
                    for line in _message_end(chat, event.report, live):
                        yield line
        except Exception as failed:
            yield event_line("error", error=error(errors.of(failed))["error"])


def _message_end(chat: ChatRequest, report: Report, live: bool) -> list[str]:
    blocks, called = _blocks(chat, report)
    lines = [event_line("content_block_stop", index=0)] if live else []
    for i, block in enumerate([] if live else blocks):
        if block["type"] == "text":
            delta = {"type": "text_delta", "text": block["text"]}
            start = {"type": "text", "text": ""}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            start = {**block, "input": {}}
        lines.append(event_line("content_block_start", index=i, content_block=start))
        lines += [event_line("content_block_delta", index=i, delta=delta), event_line("content_block_stop", index=i)]
    ended = {"stop_reason": _stop_reason(report, called), "stop_sequence": None}
    return [*lines, event_line("message_delta", delta=ended, usage=_counted(report)), event_line("message_stop")]
