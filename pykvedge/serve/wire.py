"""Defines requests of OpenAI's chat completions; other formats are translated to these. Unknown fields are ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, from_json

from pykvedge.errors import RequestError

MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, MAX_CHOICES, MAX_BIASES = 4096, 256, 128, 8, 4096

Object: TypeAlias = dict[str, Any]

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Limit = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: no limit
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class Wire(BaseModel):
    """Base of all requests. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class ImageUrl(Wire):
    """A picture: a data: URL, or another URL that the server's options allow."""

    url: str
    detail: str | None = None


class TextPart(Wire):
    type: Literal["text"]
    text: str


class ImagePart(Wire):
    type: Literal["image_url"]
    image_url: ImageUrl | str

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class FileData(Wire):
    """A PDF as a data: URL. filename: its name in messages; a range selects pages, as in report.pdf[3-7]."""

    file_data: str | None = None
    filename: Annotated[str, Field(max_length=1024)] | None = None
    file_id: str | None = None
    file_url: str | None = None

    @model_validator(mode="after")
    def _is_here(self) -> FileData:
        if self.file_data is None or self.file_id is not None or self.file_url is not None:
            named = "file_id" if self.file_id is not None else "file_url"
            why = f"{named} is not supported" if self.file_id or self.file_url else "file_data is missing"
            raise ValueError(f"{why}; send file_data with data:application/pdf;base64,...")
        return self


class FilePart(Wire):
    type: Literal["file"]
    file: FileData

    @property
    def url(self) -> str:
        return self.file.file_data or ""


class RefusalPart(Wire):
    """Text of a refusal by the assistant."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | ImagePart | FilePart | RefusalPart, Field(discriminator="type")]


class Function(Wire):
    """A function call. arguments: JSON as text."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Wire):
    """A tool call of the assistant."""

    id: str = ""
    type: str = "function"
    function: Function


class WireMessage(Wire):
    """A message of the conversation. The role `function` and the field `function_call` are older names for tools."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Function | None = None

    @model_validator(mode="after")
    def _of_today(self) -> WireMessage:
        if self.function_call is not None and not self.tool_calls:
            self.tool_calls = [ToolCall(function=self.function_call)]
        if self.role == "function":
            self.role = "tool"
        return self

    @property
    def parts(self) -> list[Part]:
        """Returns the content as a list of parts. A plain text becomes one part."""
        text = self.content or ""
        return [TextPart(type="text", text=text)] if isinstance(text, str) else text


class StreamOptions(Wire):
    """include_usage: sends the token counts in a last chunk."""

    include_usage: bool = False


class JsonSchema(Wire):
    """A schema with a name. The field `schema` is named as in OpenAI's format."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class FunctionTool(Wire):
    """A function that the model may call. parameters: a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Wire):
    name: str


class NamedTool(Wire):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


def _known_choice(value: Any) -> Any:
    kind = value.get("type", "function") if isinstance(value, dict) else "function"
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"a choice of type {kind:.40} is not supported; none, auto, required and one function are")
    return value


KnownChoice = BeforeValidator(_known_choice)


class Compression(Wire):
    """What to keep of the conversation, like the options of `kvedge chat`.

    patches: reports which patches of each picture are kept. progress: the stream begins at once, and reports how much
    of the prompt was read. edited: for a known conversation whose pictures were dropped or replaced by text; "demote":
    continues from its rows, without the rows of these pictures.
    """

    model_config = ConfigDict(extra="forbid")

    method: str | None = None
    budget: int | float | None = None
    image_tokens: int | float | None = None
    pruner: str | None = None
    settings: dict[str, int | float | str | bool] = {}
    patches: bool = False
    progress: bool = False
    edited: Literal["demote"] | None = None

    @field_validator("budget", "image_tokens")
    @classmethod
    def _share(cls, value: float | None) -> float | None:
        """Takes 1 as the whole: most languages write 1.0 as 1, and a budget of one KV pair is useless."""
        return 1.0 if value == 1 else value


class Sampled(Wire):
    """The fields of all requests for an answer. kvedge: only this server has this field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None  # 0: reads the prompt without an answer
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Limit | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**20)] | None = None  # -1: the whole answer
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    timings_per_token: bool = False
    return_progress: bool = False
    kvedge: Compression | None = None


class Prompted(Sampled):
    """One prompt without a chat template. A request with several prompts becomes several of these.

    prompt: texts and token ids. pictures: URLs. likeliest: number of likeliest tokens to report per token of the
    answer; None: no probabilities. keep: keeps the read prompt for equal requests.
    """

    prompt: list[str | int]
    pictures: list[str] = []
    likeliest: int | None = None
    keep: bool = True
    logit_bias: dict[str, float] | None = None


class ChatRequest(Sampled):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | None, KnownChoice] = None
    modalities: list[Literal["text"]] | None = None
    functions: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _goes_on(self) -> ChatRequest:
        """Checks the fields about the prompt's end. The answer always continues a last message of the assistant."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the role assistant")
        return self

    @model_validator(mode="after")
    def _of_today(self) -> ChatRequest:
        """Renames the old field `functions` to `tools`."""
        if not self.functions:
            return self
        if self.tools:
            raise ValueError("tools and functions exclude each other; give tools")
        self.tools, self.parallel_tool_calls = [Tool(type="function", function=one) for one in self.functions], False
        call = self.function_call
        self.tool_choice = NamedTool(function=call) if isinstance(call, NamedFunction) else call
        return self


def parsed(kind: type[Wire], body: bytes) -> Any:
    """Parses a request. Raises RequestError, which names the first invalid field."""
    try:
        return kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        if found[0]["type"] == "json_invalid":
            why = found[0]["msg"]
            raise RequestError(400, f"the body is not valid JSON: {why}", "invalid_json") from None
        where, what = _worst(found, from_json(body))
        raise RequestError(400, f"{where or 'the body'}: {what}", "invalid_value", where or None) from None
    except (RecursionError, MemoryError):
        raise RequestError(400, "the body is nested too deeply", "invalid_json") from None


def _worst(found: list[ErrorDetails], body: Any) -> tuple[str, str]:
    """Returns path and text of the first error. For a value with several possible forms, takes the deepest path.

    Joins the texts if this path has several errors.
    """
    placed = [(_path(error, body), error) for error in found]
    first = placed[0][0]
    inside = [(path, error) for path, error in placed if path[: len(first)] == first]
    deepest = max((path for path, _ in inside), key=len)
    said = dict.fromkeys(_said(path, error) for path, error in inside if path == deepest)
    return ".".join(map(str, deepest)), ", or: ".join(said)


def _path(error: ErrorDetails, body: Any) -> tuple[int | str, ...]:
    """Returns the path of an error in the body, without the names of the forms that pydantic tried."""
    out = list[int | str]()
    for i, part in enumerate(error["loc"]):
        inside = part in (body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ())
        if inside:
            body = body[part]
        if inside or (isinstance(body, dict) and i + 1 == len(error["loc"]) and error["type"] == "missing"):
            out.append(part)
    return tuple(out)


def _said(path: tuple[int | str, ...], error: ErrorDetails) -> str:
    told = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(told["error"])
    if error["type"] == "union_tag_not_found":
        return "the field type is missing"
    if error["type"] != "union_tag_invalid":
        return error["msg"]
    *most, last = str(told["expected_tags"]).replace("'", "").split(", ")
    inside = [part for part in path if isinstance(part, str)][-1:]
    what = {"content": "parts", "output": "parts", "source": "sources"}.get("".join(inside), "items")
    known = f"{', '.join(most)} or " if most else ""
    return f"{what} of type {told['tag']!s:.40} are not supported; use {known}{last}"


# -------------------------------------------------------------------- helpers for translations of other formats


def chat_request(fields: Object) -> ChatRequest:
    """Makes the chat request of a translation. Raises RequestError: an invalid result means an invalid client field."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate(given, strict=True)
    except ValidationError:
        pass
    try:  # parses again as JSON, because these error messages use JSON's words
        body = json.dumps(given, default=lambda one: one.model_dump(exclude_none=True))
        return parsed(ChatRequest, body.encode())
    except (TypeError, ValueError, RecursionError) as broken:
        raise RequestError(400, f"the body cannot be translated: {broken}", "invalid_json") from None


def event_line(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
