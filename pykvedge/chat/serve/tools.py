"""Tools for a model whose template knows none: how it is told of them, made to call one, and how a call is read.

A call is a JSON object, and a forced one follows a schema. Where in an answer calls are is chat/serve/reading.py's.
"""

from __future__ import annotations

import json
from typing import Any

from pykvedge.chat.serve.wire import ChatRequest, NamedTool, Tool
from pykvedge.errors import RequestError
from pykvedge.models.dialect import Call

HOW = (
    "You may call functions. To call one, answer with nothing but a JSON object of the form "
    '{"name": NAME, "arguments": {...}}. The functions:\n'
)


def offered(given: ChatRequest) -> list[Tool]:
    """Lists the tools that the model may call."""
    return given.tools if given.tools and given.tool_choice != "none" else []


def told(tools: list[Tool]) -> str:
    """Writes what a model is told whose template knows nothing of tools."""
    return HOW + "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)


def forced_schema(tools: list[Tool], choice: str | NamedTool | None) -> dict[str, Any] | None:
    """Makes the schema of a call that must be made; None where the model chooses. Raises RequestError."""
    if choice in (None, "auto", "none"):
        return None
    chosen = tools
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            raise RequestError(
                400, f"tool_choice: there is no tool {choice.function.name!r:.80}", "invalid_value", "tool_choice"
            )
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in chosen
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def calls_of(text: str, names: set[str]) -> list[Call]:
    """Reads a text that is a call of one of these tools, or a list of calls. Empty: it is something else."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return []
    out = []
    for one in given if isinstance(given, list) else [given]:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str) or name not in names:
            return []
        arguments = one.get("arguments", one.get("parameters", {}))
        out.append(Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return out


def arguments_of(call: Call) -> dict[str, Any]:
    """Reads the arguments of a call as an object; a model may write text that is none, which is then "text" in it."""
    try:
        given = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"text": call.arguments}
