"""Tools: which a request offers, and what form a call of them has.

A model whose template knows tools writes calls in its dialect, by that dialect's grammar. Another one is told of them
in words, and a call is a JSON object, by a schema where it is forced. serve/reading.py finds calls in answers.
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
    """Lists the tools that the model may call."""
    return given.tools if given.tools and given.tool_choice != "none" else []


def chosen(given: ChatRequest) -> list[Tool]:
    """Lists those of them that `tool_choice` allows. Raises RequestError where it names none of them."""
    choice, tools = given.tool_choice, offered(given)
    if not isinstance(choice, NamedTool):
        return tools
    name = choice.function.name
    if not any(tool.function.name == name for tool in tools):
        raise wrong("tool_choice", f"there is no tool {name!r:.80}")
    return [tool for tool in tools if tool.function.name == name]


def is_forced(given: ChatRequest) -> bool:
    """Tells whether one of the tools must be called."""
    return given.tool_choice not in (None, "none", "auto")


def told(tools: list[Tool]) -> str:
    """Writes what a model is told whose template knows nothing of tools."""
    return HOW + "\n".join(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)


def forced_schema(tools: list[Tool]) -> dict[str, Any]:
    """Makes the schema of a call that must be made."""
    calls = []
    for i, tool in enumerate(tools):
        place = "#/properties/arguments" if len(tools) == 1 else f"#/anyOf/{i}/properties/arguments"
        arguments = below(tool.function.parameters or {"type": "object"}, place)
        properties = {"name": {"const": tool.function.name}, "arguments": arguments}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"],
                      "additionalProperties": False})  # fmt: skip
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def form(dialect: Dialect) -> Lazy:
    """Makes the form of calls in a dialect: of the whole answer where one must be made, else from where one begins."""
    triggers: dict[str, list[str]] = {"word": [], "pattern": [], "pattern_full": []}
    for kind, value in dialect.triggers:
        triggers.setdefault(kind, []).append(value)
    patterns = [*triggers["pattern"], *(f"^(?:{pattern})$" for pattern in triggers["pattern_full"])]
    return Lazy(dialect.grammar, tuple(triggers["word"]), tuple(patterns), preserved=tuple(sorted(dialect.shown)),
                prefix=dialect.begin, thinking=dialect.thought)  # fmt: skip


def form_fits(dialect: Dialect, model: Model) -> bool:
    """Tells whether an answer of this model can follow that form."""
    try:
        Grammar(Sampling(grammar=form(dialect)), model)
    except KvedgeError:
        return False
    return True


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
