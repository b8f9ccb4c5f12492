"""Requests of OpenAI's chat completions. Fields that nobody here knows are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pykvedge.errors import RequestError

MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, MOST_CHOICES = 4096, 256, 128, 8

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Wire(BaseModel):
    """All of them: what is not known is passed over."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class ImageUrl(Wire):
    """A picture: a data: URL, and what else the server was told to fetch."""

    url: str
    detail: str | None = None


class Part(Wire):
    """A part of a message: text or image_url."""

    type: Literal["text", "image_url", "input_text", "input_image", "refusal"]
    text: str | None = None
    image_url: ImageUrl | str | None = None


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
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=MOST_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = None


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
    far the prompt was read.
    """

    model_config = ConfigDict(extra="forbid")

    method: str | None = None
    budget: int | float | None = None
    image_tokens: int | float | None = None
    pruner: str | None = None
    settings: dict[str, int | float | str | bool] = {}
    patches: bool = False
    progress: bool = False


class ChatRequest(Wire):
    """The body of POST /v1/chat/completions. kvedge: of this server alone."""

    model: str | None = None
    messages: Annotated[list[WireMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    repeat_last_n: Annotated[int, Field(ge=0, le=2**20)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kvedge: Compression | None = None


def parsed(kind: type[Wire], body: bytes) -> Any:
    """Reads a request. Raises RequestError, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            raise RequestError(400, f"the body is no JSON that can be read: {first['msg']}", "invalid_json") from None
        raise RequestError(400, f"{where or 'the body'}: {first['msg']}", "invalid_value", where or None) from None
    except (RecursionError, MemoryError):
        raise RequestError(400, "the body is nested too deeply", "invalid_json") from None
