"""Requests of OpenAI's chat completions, also as translations of others. Fields that nobody knows are passed over."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, from_json

from pykvedge.errors import RequestError

MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, MOST_CHOICES, MOST_BIASES = 4096, 256, 128, 8, 4096

Object: TypeAlias = dict[str, Any]

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Limit = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: none
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class Wire(BaseModel):
    """All of them: what is not known is passed over."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class ImageUrl(Wire):
    """A picture: a data: URL, and what else the server was told to fetch."""

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
    """A PDF as a data: URL. filename: for messages, and where it says which pages are meant (report.pdf[3-7])."""

    file_data: str | None = None
    filename: Annotated[str, Field(max_length=1024)] | None = None
    file_id: str | None = None
    file_url: str | None = None

    @model_validator(mode="after")
    def _is_here(self) -> FileData:
        if self.file_data is None or self.file_id is not None or self.file_url is not None:
            named = "file_id" if self.file_id is not None else "file_url"
            why = f"files by {named} are not supported" if self.file_id or self.file_url else "there is no file_data"
            raise ValueError(f"{why}; send file_data, as data:application/pdf;base64,...")
        return self


class FilePart(Wire):
    type: Literal["file"]
    file: FileData

    @property
    def url(self) -> str:
        return self.file.file_data or ""


class RefusalPart(Wire):
    """Text with which an assistant refused."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | ImagePart | FilePart | RefusalPart, Field(discriminator="type")]


class Function(Wire):
    """A call of a function; arguments are JSON as text."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Wire):
    """A call that the assistant made."""

    id: str = ""
    type: str = "function"
    function: Function


class WireMessage(Wire):
    """A message of the conversation. The role `function` and `function_call` are older names of what tools do now."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(max_length=MOST_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
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
        """The content, where it is one text too, in parts."""
        text = self.content or ""
        return [TextPart(type="text", text=text)] if isinstance(text, str) else text


class StreamOptions(Wire):
    """include_usage: a last chunk tells how many tokens there were."""

    include_usage: bool = False


class JsonSchema(Wire):
    """A schema with a name; the field is called as in JSON schema's own documents."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class FunctionTool(Wire):
    """A function that the model may ask for; parameters: a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    """A tool: only functions are known."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Wire):
    name: str


class NamedTool(Wire):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Compression(Wire):
    """What of the conversation is kept: as the options of `kvedge chat` say it.

    patches: the answer's figures tell what is left of each picture. progress: a stream begins at once, and tells how
    far the prompt was read. edited: what becomes of a known conversation of which pictures were dropped, or replaced by
    text; "demote": it goes on from its rows, and these pictures keep none.
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
        """Takes 1 as the whole: most languages write 1.0 so, and nobody keeps one pair."""
        return 1.0 if value == 1 else value


class Sampled(Wire):
    """What all requests for an answer may say of it. kvedge: of this server alone."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None  # 0: the prompt is read, and nothing is answered
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Limit | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**20)] | None = None  # -1: the whole answer
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    timings_per_token: bool = False
    return_progress: bool = False
    kvedge: Compression | None = None


class Prompted(Sampled):
    """One prompt, which no chat template is put around; what requests with several are cut into.

    prompt: texts, and tokens by their numbers. pictures: URLs. likeliest: of so many tokens the likelihood is told
    beside those of the answer; None: of none. keep: for whoever asks the same again.
    """

    prompt: list[str | int]
    pictures: list[str] = []
    likeliest: int | None = None
    keep: bool = True
    logit_bias: dict[str, float] | None = None


class ChatRequest(Sampled):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    modalities: list[Literal["text"]] | None = None
    functions: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _goes_on(self) -> ChatRequest:
        """Checks what is said of the prompt's end: a last message of the assistant's is gone on with in any case."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the last message is not the assistant's")
        return self

    @model_validator(mode="after")
    def _of_today(self) -> ChatRequest:
        """Takes `functions` as the tools that they are now called."""
        if not self.functions:
            return self
        if self.tools:
            raise ValueError("tools and functions are two names of the same; give one of them")
        self.tools, self.parallel_tool_calls = [Tool(type="function", function=one) for one in self.functions], False
        call = self.function_call
        self.tool_choice = NamedTool(function=call) if isinstance(call, NamedFunction) else call
        return self


def parsed(kind: type[Wire], body: bytes) -> Any:
    """Reads a request. Raises RequestError, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        if found[0]["type"] == "json_invalid":
            why = found[0]["msg"]
            raise RequestError(400, f"the body is no JSON that can be read: {why}", "invalid_json") from None
        where, what = _worst(found, from_json(body))
        raise RequestError(400, f"{where or 'the body'}: {what}", "invalid_value", where or None) from None
    except (RecursionError, MemoryError):
        raise RequestError(400, "the body is nested too deeply", "invalid_json") from None


def _worst(found: list[ErrorDetails], body: Any) -> tuple[str, str]:
    """Says where the first error is and what it is; of a value that may have several forms, in the one it has most of.

    Where no form is nearer than another, all of them are said.
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
        return "it has no type"
    if error["type"] != "union_tag_invalid":
        return error["msg"]
    *most, last = str(told["expected_tags"]).replace("'", "").split(", ")
    inside = [part for part in path if isinstance(part, str)][-1:]
    what = {"content": "parts", "output": "parts", "source": "sources"}.get("".join(inside), "items")
    known = f"{', '.join(most)} and " if most else ""
    return f"{what} of type {told['tag']!s:.40} are not supported; {known}{last} are"


# --------------------------------------------------------------------- what translations of other formats share


def chat_request(fields: Object) -> ChatRequest:
    """Makes the chat request; what a translation got wrong is the client's field all the same."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate(given, strict=True)
    except ValidationError:
        pass
    try:  # says what is wrong in the words of JSON
        body = json.dumps(given, default=lambda one: one.model_dump(exclude_none=True))
        return parsed(ChatRequest, body.encode())
    except (TypeError, ValueError, RecursionError) as broken:
        raise RequestError(400, f"the body cannot be translated: {broken}", "invalid_json") from None


def event_line(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
