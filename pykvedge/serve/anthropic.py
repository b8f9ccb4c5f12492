"""Answers POST /v1/messages: translates Anthropic's wire format to chat completions and back."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pykvedge.models.dialect import ParsedAnswer
from pykvedge.runtime.report import Report
from pykvedge.serve import completions, errors, wire
from pykvedge.serve import tools as calling
from pykvedge.serve.completions import Events, EventStream, asked, begun, complete, parts, reading_of, usage, whole
from pykvedge.serve.job import Job
from pykvedge.serve.reading import Delta
from pykvedge.serve.service import Service
from pykvedge.serve.waiting import Waiting
from pykvedge.serve.wire import ChatRequest, Object, Wire


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


class DocumentSource(Wire):
    type: str
    media_type: str = ""
    data: str = ""


class DocumentBlock(Wire):
    """A PDF. title: its name; a range selects pages, as in report.pdf[3-7]."""

    type: Literal["document"]
    source: DocumentSource
    title: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _is_pdf(self) -> DocumentBlock:
        source = self.source
        if source.type != "base64":
            raise ValueError(
                f"documents with source type '{source.type:.40}' are not supported; send a PDF with "
                f"source type 'base64'"
            )
        if source.media_type != "application/pdf":
            raise ValueError(
                f"documents with media type '{source.media_type:.40}' are not supported; send 'application/pdf'"
            )
        return self


class ToolUseBlock(Wire):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[Object, Field(default_factory=dict)]


class ToolResultBlock(Wire):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_Shown], Field(max_length=wire.MAX_PARTS)] | None = None


class ThinkingBlock(Wire):
    """The assistant's thinking before an earlier answer. A redacted block has no text."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


_Shown = Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]
_Block = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")
]


class AnthropicMessage(Wire):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[_Block], Field(max_length=wire.MAX_PARTS)]


class AnthropicTool(Wire):
    """A function that the model may call. Anthropic's tools are refused: they run at Anthropic or hide their schema."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Object | None = None


class AnthropicChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Wire):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=wire.MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(max_length=wire.MAX_PARTS)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=wire.MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    output_format: Object | None = None  # older name of output_config.format
    kvedge: wire.Compression | None = None


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: wire.Count
    stream: bool | None = None
    temperature: wire.Temperature | None = None
    top_p: wire.Share | None = None
    top_k: wire.Limit | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None


async def answer(service: Service, http: HttpRequest, given: MessagesRequest) -> Response:
    chat = _of_messages(given)
    waiting = await asked(service, http, chat)
    if given.stream:
        return EventStream(_message_events(service, chat, waiting, await begun(waiting)))
    report = (await complete(waiting))[0].report
    parsed = await whole(chat, waiting, 0, report)
    why = _ended(chat, waiting.jobs[0], bool(parsed.calls))
    return JSONResponse({**_message_head(service), "content": _blocks(parsed), **why, "usage": _counted(report)})


async def count(service: Service, http: HttpRequest, given: CountRequest) -> Response:
    """Answers POST /v1/messages/count_tokens: the number of tokens of a prompt, with tokens of its pictures."""
    chat = _of_messages(MessagesRequest(**dict(given), max_tokens=1))
    return JSONResponse({"input_tokens": await completions.count(service, http, chat)})


def _of_messages(given: MessagesRequest) -> ChatRequest:
    out: list[Object] = []
    if given.system is not None:
        system = given.system if isinstance(given.system, str) else [_shown(block) for block in given.system]
        out.append({"role": "system", "content": system})
    for message in given.messages:
        out += _turns(message)
    choice: Any = None
    several = None
    if given.tool_choice is not None:
        several = False if given.tool_choice.disable_parallel_tool_use else None
        named = {"type": "function", "function": {"name": given.tool_choice.name or ""}}
        choice = {"auto": "auto", "any": "required", "none": "none", "tool": named}[given.tool_choice.type]
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.input_schema}}
        for t in given.tools or []
    ]
    plain = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
    same = {name: getattr(given, name) for name in plain}
    form = (given.output_config or {}).get("format") or given.output_format
    effort = "none" if (given.thinking or {}).get("type") == "disabled" else None
    return wire.chat_request({**same, "messages": out, "stop": given.stop_sequences, "tools": tools or None,
                              "tool_choice": choice, "parallel_tool_calls": several, "reasoning_effort": effort,
                              "response_format": form, "kvedge": given.kvedge})  # fmt: skip


def _turns(message: AnthropicMessage) -> list[Object]:
    """Returns the chat completion messages of one message: tool results are separate messages, and come first."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts, calls, results = list[Object](), list[Object](), list[Object]()
    thought = ""
    for block in message.content:
        if isinstance(block, (TextBlock, ImageBlock, DocumentBlock)):
            parts.append(_shown(block))
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            inside = block.content
            content = [_shown(one) for one in inside] if isinstance(inside, list) else inside or ""
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            thought += block.thinking
    own: Object = {"role": message.role, "content": parts}
    own.update({"tool_calls": calls} if calls else {}, **({"reasoning_content": thought} if thought else {}))
    return [*results, own] if parts or calls else results


def _shown(block: TextBlock | ImageBlock | DocumentBlock) -> Object:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, DocumentBlock):
        file = {"file_data": f"data:application/pdf;base64,{block.source.data}", "filename": block.title}
        return {"type": "file", "file": file}
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _ended(chat: ChatRequest, job: Job, called: bool) -> Object:
    """Returns why an answer ended. Only the client's stop texts count; the model's own stop text is a normal end."""
    finish, text = job.report.finish, job.stop_text
    why = "max_tokens" if finish in ("length", "context") else "tool_use" if called else "end_turn"
    if why == "end_turn" and finish == "stop" and text in (chat.stop or ()):
        why = "stop_sequence"
    return {"stop_reason": why, "stop_sequence": text if why == "stop_sequence" else None}


def _blocks(parsed: ParsedAnswer) -> list[Object]:
    blocks: list[Object] = []
    if parsed.reasoning:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.text or not parsed.calls:
        blocks.append({"type": "text", "text": parsed.text})
    for call in parsed.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": calling.arguments_of(call)})
    return blocks


def _counted(report: Report) -> Object:
    counts = usage([report])
    return {
        "input_tokens": counts["prompt_tokens"] - report.tokens.reused,
        "cache_read_input_tokens": report.tokens.reused,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
        **({} if report.demoted_images is None else {"demoted_images": report.demoted_images}),
    }


def _message_head(service: Service) -> Object:
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": service.name}


async def _message_events(service: Service, chat: ChatRequest, waiting: Waiting, events: Events) -> AsyncIterator[str]:
    answer, blocks, started = reading_of(chat, waiting), _Blocks(), False
    with waiting:
        try:
            async for done, deltas in parts(answer, events):
                if not started:  # the prompt's token counts are known now
                    started = True
                    counted = {**_counted(waiting.jobs[0].report), "output_tokens": 0}
                    head = {**_message_head(service), "content": [], "stop_reason": None, "stop_sequence": None}
                    yield wire.event_line("message_start", message={**head, "usage": counted})
                for delta in deltas:
                    yield blocks.written(delta)
                if done is not None:
                    yield blocks.end()
                    why = _ended(chat, waiting.jobs[0], bool(answer.parsed.calls))
                    yield wire.event_line("message_delta", delta=why, usage=_counted(done.report))
                    yield wire.event_line("message_stop")
        except Exception as failed:
            yield wire.event_line("error", error=errors.anthropic_body(errors.of(failed))["error"])


class _Blocks:
    """Writes the blocks of a message as events: each block starts, continues, and stops before the next block."""

    def __init__(self) -> None:
        self._index, self._open = -1, ""

    def written(self, delta: Delta) -> str:
        """Returns the events for the next part of an answer."""
        begun: Object
        if delta.reasoning:
            what, begun = "thinking", {"type": "thinking", "thinking": "", "signature": ""}
            more = {"type": "thinking_delta", "thinking": delta.reasoning}
        elif delta.call >= 0:
            what, begun = f"call {delta.call}", {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            more = {"type": "input_json_delta", "partial_json": delta.arguments}
        else:
            what, begun = "text", {"type": "text", "text": ""}
            more = {"type": "text_delta", "text": delta.text}
        lines = ""
        if what != self._open:
            lines += self._ended()
            self._index, self._open = self._index + 1, what
            lines += wire.event_line("content_block_start", index=self._index, content_block=begun)
        if any(more[name] for name in more if name != "type"):
            lines += wire.event_line("content_block_delta", index=self._index, delta=more)
        return lines

    def end(self) -> str:
        """Returns the events for the end of the last block. A message has at least one block."""
        return self._ended() if self._open else self.written(Delta()) + self._ended()

    def _ended(self) -> str:
        return wire.event_line("content_block_stop", index=self._index) if self._open else ""
