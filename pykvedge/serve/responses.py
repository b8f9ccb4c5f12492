"""Answers POST /v1/responses: translates OpenAI's newer wire format to chat completions and back."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pykvedge.errors import RequestError
from pykvedge.models.dialect import Call, ParsedAnswer
from pykvedge.runtime.report import Report
from pykvedge.serve import completions, errors, wire
from pykvedge.serve.completions import Events, EventStream
from pykvedge.serve.reading import Delta
from pykvedge.serve.service import Service
from pykvedge.serve.waiting import Waiting
from pykvedge.serve.wire import ChatRequest, Object, RefusalPart, Wire


class InputText(Wire):
    """Text. The text of an answer has type `output_text`."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(Wire):
    """A picture."""

    type: Literal["input_image"]
    image_url: str


class InputFile(wire.FileData):
    """A PDF."""

    type: Literal["input_file"]


_Part = Annotated[InputText | InputImage | InputFile | RefusalPart, Field(discriminator="type")]
_Parts = Annotated[list[_Part], Field(max_length=wire.MAX_PARTS)]


class MessageItem(Wire):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class CallItem(Wire):
    """A tool call of the assistant. arguments: JSON as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"


class CallOutputItem(Wire):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


class ReasoningText(Wire):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(Wire):
    """The assistant's thinking before the next item."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=wire.MAX_PARTS)] | None = None


_Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(lambda item: item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)),
]


class ResponsesTool(Wire):
    """A function that the model may call. parameters: a JSON schema. Other types of tools are refused."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class ChosenTool(Wire):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(Wire):
    """The body of POST /v1/responses. Nothing is stored: earlier messages come with the request."""

    model: str | None = None
    input: str | Annotated[list[_Item], Field(min_length=1, max_length=wire.MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: wire.Count | None = None
    temperature: wire.Temperature | None = None
    top_p: wire.Share | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=wire.MAX_TOOLS)] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ChosenTool | None, wire.KnownChoice] = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=wire.MAX_PARTS)] | None = None
    top_logprobs: int | None = None
    metadata: Object | None = None
    reasoning: Object | None = None
    text: Object | None = None
    previous_response_id: str | None = None
    conversation: str | Object | None = None
    prompt: Object | None = None
    background: bool | None = None
    kvedge: wire.Compression | None = None


async def answer(service: Service, http: HttpRequest, given: ResponsesRequest) -> Response:
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(given, name) not in (None, False):
            why = f"{name} is not supported, because this server stores no responses; send the whole conversation"
            raise RequestError(400, why, "unsupported", name)
    for name, asked in (("include", "message.output_text.logprobs" in (given.include or [])),
                        ("top_logprobs", bool(given.top_logprobs))):  # fmt: skip
        if asked:
            why = f"{name}: /v1/chat/completions tells how likely tokens are, by logprobs and top_logprobs"
            raise RequestError(400, why, "unsupported", name)
    chat = _of_responses(given)
    waiting = await completions.asked(service, http, chat)
    if given.stream:
        return EventStream(_response_events(service, given, chat, waiting, await completions.begun(waiting)))
    report = (await completions.complete(waiting))[0].report
    parsed = await completions.whole(chat, waiting, 0, report)
    return JSONResponse(_response(service, given, report, parsed, _output(parsed), _number("resp")))


def _of_responses(given: ResponsesRequest) -> ChatRequest:
    messages: list[Object] = [{"role": "system", "content": given.instructions}] if given.instructions else []
    items = [MessageItem(role="user", content=given.input)] if isinstance(given.input, str) else given.input
    thought = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thought += "\n".join(part.text for part in item.content or [])
            continue
        turn, before = _message_of(item), messages[-1] if messages else {}
        if "tool_calls" in turn and before.get("role") == "assistant":  # both are parts of one answer
            before["tool_calls"] = [*before.get("tool_calls", []), *turn["tool_calls"]]
            continue
        if turn["role"] == "assistant" and thought:
            turn["reasoning_content"] = thought
        thought = ""
        messages.append(turn)
    tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in given.tools or []]
    choice: Any = given.tool_choice
    if isinstance(choice, ChosenTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    form = (given.text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}
    same = {name: getattr(given, name) for name in ("model", "stream", "temperature", "top_p", "parallel_tool_calls")}
    effort = (given.reasoning or {}).get("effort")
    return wire.chat_request({**same, "reasoning_effort": effort, "messages": messages, "tools": tools or None,
                              "max_tokens": given.max_output_tokens, "tool_choice": choice, "response_format": form,
                              "kvedge": given.kvedge})  # fmt: skip


def _message_of(item: MessageItem | CallItem | CallOutputItem) -> Object:
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]}
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _parts(item.output)}
    return {"role": item.role, "content": _parts(item.content)}


def _parts(content: str | list[InputText | InputImage | InputFile | RefusalPart]) -> str | list[Object]:
    return content if isinstance(content, str) else [_shown(part) for part in content]


def _shown(part: InputText | InputImage | InputFile | RefusalPart) -> Object:
    if isinstance(part, InputText):
        return {"type": "text", "text": part.text}
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": part.image_url}
    if isinstance(part, InputFile):
        return {"type": "file", "file": {"file_data": part.file_data, "filename": part.filename}}
    return part.model_dump()


def _response_head(service: Service, given: ResponsesRequest, number: str, status: str) -> Object:
    return {
        "id": number, "object": "response", "created_at": int(time.time()), "status": status, "model": service.name,
        "output": [], "error": None, "incomplete_details": None, "usage": None, "previous_response_id": None,
        "store": False, "background": False, "truncation": "disabled", **_settings(given),
    }  # fmt: skip


def _settings(given: ResponsesRequest) -> Object:
    """Repeats what the request set, for clients that read it in the response."""
    same = {"instructions", "max_output_tokens", "temperature", "top_p"}
    usual: Object = {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "top_logprobs": 0}
    told = given.model_dump(include=same | usual.keys())
    return {
        **{name: usual.get(name) if value is None else value for name, value in told.items()},
        "reasoning": {"effort": (given.reasoning or {}).get("effort"), "summary": None},
        "text": {"format": (given.text or {}).get("format") or {"type": "text"}},
    }


def _thinking_item(number: str, text: str, status: str) -> Object:
    content = [{"type": "reasoning_text", "text": text}] if status == "completed" else []
    return {"type": "reasoning", "id": number, "summary": [], "content": content, "status": status}


def _message_item(number: str, text: str, status: str) -> Object:
    content = [{"type": "output_text", "text": text, "annotations": []}] if status == "completed" else []
    return {"type": "message", "id": number, "role": "assistant", "status": status, "content": content}


def _call_item(number: str, call: Call, status: str) -> Object:
    return {"type": "function_call", "id": number, "call_id": call.id, "status": status, "name": call.name,
            "arguments": call.arguments}  # fmt: skip


def _output(parsed: ParsedAnswer) -> list[Object]:
    out: list[Object] = []
    if parsed.reasoning:
        out.append(_thinking_item(_number("rs"), parsed.reasoning, "completed"))
    if parsed.text or not parsed.calls:
        out.append(_message_item(_number("msg"), parsed.text, "completed"))
    return [*out, *(_call_item(_number("fc"), call, "completed") for call in parsed.calls)]


def _number(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _response(
    service: Service, given: ResponsesRequest, report: Report, parsed: ParsedAnswer, output: list[Object], number: str
) -> Object:
    cut = report.finish in ("length", "context")
    head = _response_head(service, given, number, "incomplete" if cut else "completed")
    counts = completions.usage([report], completions.reasoned(service, [parsed]))
    counted = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
    why = {"reason": "max_output_tokens"} if cut else None
    return {**head, "output": output, "incomplete_details": why, "usage": counted}


async def _response_events(
    service: Service, given: ResponsesRequest, chat: ChatRequest, waiting: Waiting, events: Events
) -> AsyncIterator[str]:
    number, answer, items = _number("resp"), completions.reading_of(chat, waiting), _Items()
    with waiting:
        for kind in ("response.created", "response.in_progress"):
            yield items.event(kind, response=_response_head(service, given, number, "in_progress"))
        try:
            async for done, deltas in completions.parts(answer, events):
                for delta in deltas:
                    yield items.written(delta)
                if done is not None:
                    yield items.end()
                    made = _response(service, given, done.report, answer.parsed, items.done, number)
                    kind = "response.incomplete" if made["incomplete_details"] else "response.completed"
                    yield items.event(kind, response=made)
        except Exception as failed:
            wrong = errors.of(failed)
            yield items.event("error", code=wrong.code, message=wrong.message, param=wrong.param)


class _Items:
    """Writes a response's items as events: each is added, continued, and done before the next. done: done items."""

    def __init__(self) -> None:
        self.done: list[Object] = []
        self._count, self._open, self._number = 0, "", ""
        self._call, self._text = Call("", ""), ""

    def event(self, kind: str, **fields: Any) -> str:
        """Returns an event with its sequence number."""
        self._count += 1
        return wire.event_line(kind, sequence_number=self._count - 1, **fields)

    def written(self, delta: Delta) -> str:
        """Returns the events for the next part of an answer."""
        what = "thinking" if delta.reasoning else f"call {delta.call}" if delta.call >= 0 else "message"
        lines = ""
        if what != self._open:
            lines += self._ended()
            self._open, self._text, self._call = what, "", Call(delta.name, "", delta.id)
            self._number = _number({"thinking": "rs", "message": "msg"}.get(what, "fc"))
            item = self._item("in_progress")
            lines += self.event("response.output_item.added", output_index=len(self.done), item=item)
            if what == "message":
                lines += self.event("response.content_part.added", **self._part, part=_part_of(""))
        more = delta.reasoning or delta.text or delta.arguments
        self._text += more
        if not more:
            return lines
        if what == "thinking":
            return lines + self.event("response.reasoning_text.delta", **self._part, delta=more)
        if what == "message":
            return lines + self.event("response.output_text.delta", **self._part, delta=more, logprobs=[])
        return lines + self.event("response.function_call_arguments.delta", **self._where, delta=more)

    def end(self) -> str:
        """Returns the events for the end of the last item. A response has at least one item."""
        lines = "" if self._open else self.written(Delta())
        return lines + self._ended()

    @property
    def _where(self) -> Object:
        return {"item_id": self._number, "output_index": len(self.done)}

    @property
    def _part(self) -> Object:
        return {**self._where, "content_index": 0}

    def _item(self, status: str) -> Object:
        if self._open == "thinking":
            return _thinking_item(self._number, self._text, status)
        if self._open == "message":
            return _message_item(self._number, self._text, status)
        return _call_item(self._number, replace(self._call, arguments=self._text), status)

    def _ended(self) -> str:
        if not self._open:
            return ""
        if self._open == "thinking":
            lines = self.event("response.reasoning_text.done", **self._part, text=self._text)
        elif self._open == "message":
            lines = self.event("response.output_text.done", **self._part, text=self._text, logprobs=[])
            lines += self.event("response.content_part.done", **self._part, part=_part_of(self._text))
        else:
            lines = self.event("response.function_call_arguments.done", **self._where, name=self._call.name,
                               arguments=self._text)  # fmt: skip
        item = self._item("completed")
        lines += self.event("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)
        self._open = ""
        return lines


def _part_of(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": []}
