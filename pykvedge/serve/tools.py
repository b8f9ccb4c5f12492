"""Handles tools of requests: which tools the model may call, and the form of a call.

A model whose template has tools writes calls in its dialect, by the dialect's grammar. Any other model learns of tools
from the system prompt and calls with a JSON object, by a schema if the call is forced. serve/reading.py finds calls.
"""

from __future__ import annotations

import json
from typing import Any

from pykvedge.errors import KvedgeError
from pykvedge.grammars.schema import below
from pykvedge.grammars.source import Lazy
from pykvedge.models.dialect import Call, Dialect
from pykvedge.models.model import Model
from pykvedge.runtime.grammar import Grammar
from pykvedge.runtime.sampling import Sampling
from pykvedge.serve.errors import wrong
from pykvedge.serve.wire import ChatRequest, NamedTool, Tool

HOW = (
    "You may call functions. To call one, answer with nothing but a JSON object of the form "
    '{"name": NAME, "arguments": {...}}. The functions:\n'
)


def offered(given: ChatRequest) -> list[Tool]:
    """Returns the tools that the model may call."""
    return given.tools if given.tools and given.tool_choice != "none" else []


def chosen(given: ChatRequest) -> list[Tool]:
    """Returns the offered tools that `tool_choice` allows. Raises RequestError for an unknown name."""
    choice, tools = given.tool_choice, offered(given)
    if not isinstance(choice, NamedTool):
        return tools
    name = choice.function.name
    if not any(tool.function.name == name for tool in tools):
        raise wrong("tool_choice", f"the tool {name!r:.80} is not in tools")
    return [tool for tool in tools if tool.function.name == name]


def is_forced(given: ChatRequest) -> bool:
    """Returns whether the model must call a tool."""
    return given.tool_choice not in (None, "none", "auto")


def told(tools: list[Tool]) -> str:
    """Returns the system prompt about tools, for a model whose template has no tools."""
    return HOW + "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)


def forced_schema(tools: list[Tool]) -> dict[str, Any]:
    """Returns the JSON schema of a forced call."""
    calls = []
    for i, tool in enumerate(tools):
        place = "#/properties/arguments" if len(tools) == 1 else f"#/anyOf/{i}/properties/arguments"
        arguments = below(tool.function.parameters or {"type": "object"}, place)
        properties = {"name": {"const": tool.function.name}, "arguments": arguments}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"],
                      "additionalProperties": False})  # fmt: skip
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def form(dialect: Dialect) -> Lazy:
    """Returns the grammar of calls in a dialect. A forced call is the whole answer; else the grammar has triggers."""
    triggers: dict[str, list[str]] = {"word": [], "pattern": [], "pattern_full": []}
    for kind, value in dialect.triggers:
        triggers.setdefault(kind, []).append(value)
    patterns = [*triggers["pattern"], *(f"^(?:{pattern})$" for pattern in triggers["pattern_full"])]
    return Lazy(dialect.grammar, tuple(triggers["word"]), tuple(patterns), preserved=tuple(sorted(dialect.shown)),
                prefix=dialect.begin, thinking=dialect.thought)  # fmt: skip


def form_fits(dialect: Dialect, model: Model) -> bool:
    """Returns whether this model's answers can follow the dialect's grammar."""
    try:
        Grammar(Sampling(grammar=form(dialect)), model)
    except KvedgeError:
        return False
    return True


def calls_of(text: str, names: set[str]) -> list[Call]:
    """Parses a text as one or several calls of these tools. Returns an empty list for any other text."""
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
    """Returns the arguments of a call as an object. Text that is no JSON object becomes {"text": ...}."""
    try:
        given = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"text": call.arguments}
