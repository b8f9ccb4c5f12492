"""Translates a chat request of the wire for the scheduler: messages with pictures, a plan, and a sampling."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pykvedge.errors import RequestError, UsageError
from pykvedge.models.dialect import Dialect, Dialects, request_for
from pykvedge.models.images import Picture
from pykvedge.models.pixel_file import PixelFile
from pykvedge.models.prompt import IMAGE, Message, escaped, label
from pykvedge.plans.making import another, changed
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.plan import Plan
from pykvedge.runtime.sampling import Sampling
from pykvedge.serve import tools as calling
from pykvedge.serve import wire
from pykvedge.serve.bodies import Bounds
from pykvedge.serve.errors import wrong
from pykvedge.serve.job import Prompt, Request
from pykvedge.serve.pictures import Sources
from pykvedge.serve.wire import ChatRequest, Compression, FilePart, ImagePart, Prompted, WireMessage

MAX_PICTURES = 64
_QUICK_PICTURES, _QUICK_TEXT = 8, 100_000
MAX_PIXELS = 100_000_000  # per request
_HELD = 32 << 20  # bytes of pixels in memory per request; further pixels go to a file


@dataclass(frozen=True)
class Defaults:
    """Values for what a request leaves out. max_tokens: per answer; 0: as many as fit.

    dialects: of the model's chat template, or None. tuned: note about a plan that `kvedge tune` chose; or empty.
    """

    plan: Plan
    sampling: Sampling
    sources: Sources
    max_tokens: int = 0
    room: int = 1 << 20  # most tokens of a conversation
    dialects: Dialects | None = None
    tuned: str = ""
    name: str = ""  # of the model

    @property
    def knows_tools(self) -> bool:
        """Returns whether the model's template writes the list of tools."""
        return self.dialects is not None and self.dialects.knows_tools


def request_of(given: ChatRequest | Prompted, defaults: Defaults) -> Request:
    """Translates a request. Decodes pictures, which takes time: do not call this in an event loop.

    Raises RequestError, ImageError, UsageError."""
    if isinstance(given, Prompted):
        return _request_of_prompt(given, defaults)
    messages = messages_of(given.messages, defaults.sources)
    values, tools = _values(given, defaults), calling.offered(given)
    if tools and defaults.knows_tools:
        values["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    elif tools:
        messages = _with_system(messages, calling.told(tools))
    plan, sampling = plan_of(given.kvedge, named_plan(given.model, defaults)), sampling_of(given, defaults)
    dialect = _dialect(given, defaults)
    if dialect is not None:
        sampling = replace(sampling, stop=(*sampling.stop, *dialect.stops))
        if tools and dialect.grammar and (calling.is_forced(given) or not sampling.constrained):
            sampling = replace(sampling, grammar=calling.form(dialect), json_schema=None)
    asked = given.kvedge or Compression()
    return Request(messages, plan, sampling, values, asked.patches, asked.edited is not None,
                   read_only=_limit(given) == 0, dialect=dialect)  # fmt: skip


def _values(given: ChatRequest, defaults: Defaults) -> dict[str, Any]:
    """Returns the variables of the chat template, except the tools. Raises RequestError."""
    values: dict[str, Any] = dict(given.chat_template_kwargs or {})
    if reserved := {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"} & values.keys():
        raise RequestError(
            400,
            f"chat_template_kwargs: {min(reserved)} is reserved for the server; omit {min(reserved)}",
            "invalid_value",
        )
    if given.reasoning_effort not in (None, "none"):
        values.setdefault("reasoning_effort", given.reasoning_effort)
    if defaults.dialects is not None and defaults.dialects.knows_thinking:
        # an answer by a JSON schema has no place for thinking
        values.setdefault("enable_thinking", given.reasoning_effort != "none" and "json_schema" not in _form(given))
    return values


def _dialect(given: ChatRequest, defaults: Defaults) -> Dialect | None:
    """Returns the dialect that parses the answer. None: text, or tool calls in the form of the system prompt."""
    dialects, asked = defaults.dialects, _asked_dialect(given, defaults)
    dialect = dialects.of(asked) if dialects is not None and asked is not None else None
    if dialect is None or asked is None:
        return None
    if asked["tool_choice"] == "required":  # without a grammar, a JSON schema forces the call
        return dialect if dialect.grammar and not dialect.lazy else None
    return dialect if asked["tools"] or dialect.thinks or dialect.shown else None


def _asked_dialect(given: ChatRequest, defaults: Defaults) -> dict[str, Any] | None:
    """Returns the arguments of Dialects.of. None: no dialect is needed, or the client chose the answer's form."""
    tools, form = calling.chosen(given), _form(given)
    if defaults.dialects is None or (tools and not defaults.knows_tools):
        return None
    if form and not (tools and "grammar" in form):  # a grammar may contain tool calls
        return None
    choice = "required" if calling.is_forced(given) else "auto" if tools else "none"
    written = [tool.model_dump(exclude_none=True) for tool in tools]
    several = given.parallel_tool_calls is not False
    after_tool = given.messages[-1].role == "tool"
    reasoning = given.reasoning_format or "auto"
    return request_for(written, choice, several, _values(given, defaults), reasoning, after_tool)


def _request_of_prompt(given: Prompted, defaults: Defaults) -> Request:
    pictures = _Pictures("prompt")
    for url in given.pictures:
        pictures.add(defaults.sources.load(url, pictures.next))
    plan, sampling = plan_of(given.kvedge, named_plan(given.model, defaults)), sampling_of(given, defaults)
    asked = given.kvedge or Compression()
    if asked.edited is not None:
        raise RequestError(
            400,
            "kvedge.edited works only for conversations, not for a prompt; omit kvedge.edited",
            "unsupported",
            "kvedge",
        )
    prompt = Prompt(tuple(given.prompt), tuple(pictures.all), given.keep)
    return Request([], plan, sampling, patches=asked.patches, read_only=_limit(given) == 0, prompt=prompt)


def is_quick(given: ChatRequest | Prompted, defaults: Defaults) -> bool:
    """Returns whether request_of is fast: short text, and known pictures and tools. Raises RequestError."""
    if isinstance(given, Prompted):
        texts = [part for part in given.prompt if isinstance(part, str)]
        return sum(map(len, texts)) <= _QUICK_TEXT and not given.pictures
    parts = [part for message in given.messages for part in message.parts]
    if sum(len(text_of(part)) for part in parts) > _QUICK_TEXT:
        return False
    asked = _asked_dialect(given, defaults)
    if asked is not None and defaults.dialects is not None and not defaults.dialects.knows(asked):
        return False
    urls = pictures_of(given)
    return len(urls) <= _QUICK_PICTURES and all(defaults.sources.knows(url) for url in urls)


def has_documents(given: ChatRequest | Prompted) -> bool:
    """Returns whether the request has documents, whose pages must be drawn."""
    messages = given.messages if isinstance(given, ChatRequest) else []
    return any(isinstance(part, FilePart) for message in messages for part in message.parts)


def pictures_of(given: ChatRequest | Prompted) -> list[str]:
    if isinstance(given, Prompted):
        return given.pictures
    parts = [part for message in given.messages for part in message.parts]
    return [part.url for part in parts if isinstance(part, (ImagePart, FilePart)) and part.url]


def messages_of(given: list[WireMessage], sources: Sources) -> list[Message]:
    """Converts messages. System messages at the beginning become one message. Raises RequestError, ImageError."""
    out: list[Message] = []
    pictures = _Pictures("messages")
    for i, message in enumerate(given):
        role = "system" if message.role == "developer" else message.role
        text, seen = _content(message, i, sources, pictures)
        if seen and role not in ("user", "tool"):
            raise wrong(f"messages.{i}", "only messages of the roles user and tool may have pictures")
        if role == "system" and len(out) == 1 and out[0].role == "system":
            out[0] = Message("system", f"{out[0].text}\n\n{text}")
            continue
        out.append(Message(role, text, seen, _fields(message)))
    before = out[-2].role if len(out) > 1 else "assistant"
    begun = out[-1].role == "assistant" != before and out[-1].text.strip() and not out[-1].fields.keys() - {"name"}
    if out[-1].role not in ("user", "tool") and not begun:
        why = "the last message must have the role user or tool, or be text of the role assistant to continue"
        raise wrong("messages", why)
    if out[-1].role == "user" and not out[-1].text.strip() and not out[-1].pictures:
        raise wrong("messages", "the last message is empty")
    return out


@dataclass
class _Pictures:
    """The pictures of a request, with limits on number and size. field: name of the request's field, for errors."""

    field: str
    all: list[Picture] = dataclasses.field(default_factory=list)
    _pixel_file: PixelFile = dataclasses.field(default_factory=PixelFile)

    @property
    def next(self) -> str:
        return f"picture {len(self.all) + 1}"

    def room(self) -> int:
        """Returns how many more pictures the request may have. Raises RequestError if none."""
        if len(self.all) >= MAX_PICTURES:
            raise RequestError(
                400, f"{self.field}: a request may have at most {MAX_PICTURES} pictures", "too_many_images", self.field
            )
        return MAX_PICTURES - len(self.all)

    def add(self, picture: Picture) -> Picture:
        """Adds a picture, and returns it; its pixels may move to a file. Raises RequestError, ImageError."""
        self.room()
        if sum(one.in_file or one.width * one.height for one in [*self.all, picture]) > MAX_PIXELS:
            most = MAX_PIXELS // 10**6
            raise RequestError(
                400,
                f"{self.field}: the pictures of a request may have at most {most} million pixels together",
                "too_many_pixels",
                self.field,
            )
        if sum(len(one.rgb) for one in self.all) + len(picture.rgb) > _HELD:
            picture = self._pixel_file.put(picture)
        self.all.append(picture)
        return picture


def _content(message: WireMessage, i: int, sources: Sources, pictures: _Pictures) -> tuple[str, list[Picture]]:
    parts, seen = list[str](), list[Picture]()
    literal = message.role == "user" or any(isinstance(part, (ImagePart, FilePart)) for part in message.parts)
    for part in message.parts:
        if not isinstance(part, (ImagePart, FilePart)):
            parts.append(escaped(text_of(part)) if literal else text_of(part))
            continue
        room = pictures.room()
        if not part.url:
            raise wrong(f"messages.{i}", "an image_url needs a url")
        shown: Iterable[Picture] = ()
        if isinstance(part, FilePart):
            shown = sources.pages(part.url, part.file.filename or "document.pdf", room)
        else:
            shown = [sources.load(part.url, pictures.next)]
        for picture in shown:
            parts.append(f"{label(picture, pictures.all)}: {IMAGE}" if picture.page else IMAGE)
            seen.append(pictures.add(picture))
    return "\n".join(parts), seen


def text_of(part: wire.Part) -> str:
    """Returns the text of a message part; empty for a picture or a file."""
    return part.text if isinstance(part, wire.TextPart) else getattr(part, "refusal", "")


def _fields(message: WireMessage) -> Mapping[str, Any]:
    calls = [_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
    fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
    names = ("tool_call_id", "name", "reasoning_content")
    return fields | {name: value for name in names if (value := getattr(message, name))}


def _call(number: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Returns a tool call for the chat template. Text arguments stay as they are and must be JSON; "" becomes {}."""
    arguments = arguments or "{}"
    if isinstance(arguments, str):
        Bounds().check(arguments.encode("utf-8", "replace"))
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            raise wrong("messages", "the arguments of a tool call are not JSON") from None
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages[0].role == "system":
        return [Message("system", f"{messages[0].text}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def named_plan(model: str | None, defaults: Defaults) -> Plan:
    """Returns the plan in a model's name, or the default plan. For programs that can only choose a model.

    model: the server's name, or NAME@METHOD, or NAME@METHOD-BUDGET, as in demo-model@snapkv-0.2. Raises UsageError.
    """
    name, found, text = (model or "").rpartition("@")
    if not found:
        return defaults.plan
    method, _, budget = text.rpartition("-")
    try:
        plan = make_plan(method, budget) if method and budget[:1].isdigit() else make_plan(text)
    except UsageError:
        if name == defaults.name:
            raise
        return defaults.plan
    if name != defaults.name:
        raise UsageError(f"'{model:.80}' names another model; this server has {defaults.name:.80}@{text}")
    return plan


def plan_of(given: Compression | None, default: Plan) -> Plan:
    """Returns the plan of a request: the default plan with the request's changes. Raises UsageError."""
    if given is None or not given.model_fields_set - {"patches", "progress", "edited"}:
        return default
    settings: dict[str, Any] = dict(given.settings)
    for name in sorted({"method", "budget", "params"} & set(settings)):
        raise UsageError(f"'{name}' is not allowed in kvedge.settings; give method and budget as fields of kvedge")
    if given.image_tokens is not None:
        settings["image_tokens"] = given.image_tokens
    if given.pruner is not None:
        settings["pruner"] = given.pruner
    if given.method in (None, default.method):
        return changed(default, given.budget, **settings)
    return another(default, given.method, given.budget, **settings)


def sampling_of(given: ChatRequest | Prompted, defaults: Defaults) -> Sampling:
    """Returns the sampling of a request. Raises RequestError, UsageError."""
    same = ("min_p", "typical_p", "repeat_penalty", "frequency_penalty", "presence_penalty", "stop")
    out: dict[str, Any] = {name: getattr(given, name) for name in same if getattr(given, name) is not None}
    if given.temperature is not None:
        out["temp"] = given.temperature
    elif (given.n or 1) > 1 and defaults.sampling.temp == 0:
        out["temp"] = 1.0  # several answers should differ
    if given.top_p is not None:
        out["top_p"] = max(given.top_p, 1e-6)
    if given.top_k is not None:
        out["top_k"] = max(given.top_k, 0)
    if given.repeat_last_n is not None:
        out["repeat_last_n"] = given.repeat_last_n if given.repeat_last_n >= 0 else min(defaults.room, 2**20)
    if given.seed is not None:
        out["seed"] = given.seed % 2**32 if given.seed != -1 else None
    limit = _limit(given)
    if limit is None:
        limit = defaults.max_tokens or -1
    out["max_tokens"] = defaults.room if limit < 0 else max(limit, 1)
    if given.logit_bias:
        numbers = {text: int(text) for text in given.logit_bias if text.isascii() and text.isdigit() and len(text) < 10}
        out["logit_bias"] = {numbers.get(text, text): bias for text, bias in given.logit_bias.items()}
    if (likeliest := _likeliest(given)) is not None:
        out["logprobs"] = likeliest
    if "stop" in out and not isinstance(out["stop"], str):
        out["stop"] = tuple(out["stop"])
    form = _form(given)
    if isinstance(given, ChatRequest) and calling.is_forced(given):
        form = {"json_schema": calling.forced_schema(calling.chosen(given))}
    return replace(defaults.sampling, **{**out, **form})


def _limit(given: ChatRequest | Prompted) -> int | None:
    """Returns the limit of tokens of the answer. None: not given. -1: no limit."""
    newer = given.max_completion_tokens if isinstance(given, ChatRequest) else None
    return given.max_tokens if newer is None else newer


def _likeliest(given: ChatRequest | Prompted) -> int | None:
    """Returns how many likeliest tokens to report per token of the answer. None: no probabilities."""
    if isinstance(given, Prompted):
        return given.likeliest
    if given.top_logprobs is not None and not given.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs: true", "invalid_value", "top_logprobs")
    return given.top_logprobs or 0 if given.logprobs else None


def _form(given: ChatRequest | Prompted) -> dict[str, Any]:
    """Returns the requested form of the answer (grammar, JSON schema, regex). Raises RequestError."""
    forms: list[tuple[str, Any]] = []
    if given.grammar:
        if "::=" not in given.grammar:
            raise wrong("grammar", 'the grammar has no rule; write for example root ::= "yes" | "no"')
        forms.append(("grammar", given.grammar))
    if given.json_schema is not None:
        forms.append(("json_schema", given.json_schema))
    if given.regex is not None:
        forms.append(("regex", given.regex))
    if given.response_format is not None and (schema := _schema(given.response_format)) is not None:
        forms.append(("json_schema", schema))
    forced = isinstance(given, ChatRequest) and calling.is_forced(given)
    if isinstance(given, ChatRequest) and forced and not given.tools:
        raise wrong("tool_choice", "the request has no tools; add tools, or omit tool_choice")
    if len(forms) + forced > 1:
        raise RequestError(
            400,
            "grammar, json_schema, regex, response_format and a forced tool call exclude each other; give one of them",
            "invalid_value",
        )
    return dict(forms)


def _schema(form: wire.ResponseFormat) -> dict[str, Any] | None:
    if form.type == "text":
        return None
    given = form.json_schema.schema_ if form.json_schema is not None else form.schema_
    if form.type == "json_schema" and given is None:
        raise wrong("response_format", "the type json_schema needs a schema")
    return given if given is not None else {"type": "object"}
