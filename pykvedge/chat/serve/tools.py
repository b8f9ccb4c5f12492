"""Tools: how a model is told of them, made to call one, and how its calls are found in what it writes.

Models name their calls in many ways. A forced call is one JSON object by a schema, which a grammar holds the model to.
Where it chooses by itself, objects of that form are found: alone, in a list, or between the marks of common templates.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from pykvedge.chat.serve.wire import NamedTool, Tool
from pykvedge.errors import RequestError

_MARKED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)|```(?:json)?\s*(\{.*?\}|\[.*?\])\s*```", re.DOTALL)
HOW = (
    "You may call functions. To call one, answer with nothing but a JSON object of the form "
    '{"name": NAME, "arguments": {...}}. The functions:\n'
)


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


def calls_in(text: str, tools: list[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """Finds calls of these tools in an answer. Returns the text besides them, and the calls as the wire has them."""
    names = {tool.function.name for tool in tools}
    found = _calls(text.strip(), names)
    if found:
        return "", found
    rest, calls = [], list[dict[str, Any]]()
    at = 0
    for mark in _MARKED.finditer(text):
        inside = _calls(mark[1] or mark[2] or "", names)
        if inside:
            calls += inside
            rest.append(text[at : mark.start()])
            at = mark.end()
    return ("".join(rest) + text[at:]).strip() if calls else text, calls


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Reads the arguments of a call as an object; a model may write text that is none, which is then "text" in it."""
    text = call["function"]["arguments"]
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"text": text}


def _calls(text: str, names: set[str]) -> list[dict[str, Any]]:
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
        out.append(
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
        )
    return out
