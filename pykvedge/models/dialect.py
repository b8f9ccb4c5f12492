"""A Dialect says how a model writes answers by its chat template: tool calls and reasoning, apart from the text.

llama.cpp's common chat code finds the dialect and reads answers (native/chat). To find the dialect, the template runs:
a program by the author of the model file, so a child process with limits runs it (models/sandbox.py). Answers are read
in this process: the parser is llama.cpp's, the template adds only its marks, and the work grows with the text.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pykvedge.errors import KvedgeError, LibraryError
from pykvedge.models import template_worker
from pykvedge.models.sandbox import Sandbox, chat_path
from pykvedge.models.vocabulary import Vocabulary
from pykvedge.system import dropped

_MOST = 64  # largest number of cached dialects; each list of tools of a client has one
_QUESTION = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: JSON as text; of an incomplete call, its beginning."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class ParsedAnswer:
    """The parts of an answer: text, reasoning, and calls of tools."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Dialect:
    """Describes the answers to one kind of request. Thread-safe.

    begin: the text that the template puts before an answer. grammar: GBNF of an answer with `begin` before it; if
    `lazy`, of the text after a trigger. triggers: types and values. shown: special tokens whose text `read` needs.
    stops: texts that end an answer. thinks: the model may reason before it answers. thought: the marks around
    reasoning, or None if unknown.
    """

    def __init__(self, found: Mapping[str, Any], model: Vocabulary) -> None:
        """found: a template's description by libkvedge-chat. Raises LibraryError."""
        self.begin: str = found["begin"]
        self.grammar: str = found["grammar"]
        self.lazy: bool = found["lazy"]
        self.triggers = tuple((str(one["type"]), str(one["value"])) for one in found["triggers"])
        self.shown = model.marks(found["preserved"])
        self.stops: tuple[str, ...] = tuple(found["stops"])
        self.thinks: bool = found["thinks"]
        marks = (str(found["thought_begin"]), str(found["thought_end"]))
        self.thought = marks if all(marks) else None
        self._library, self._parser, why = _library(), ctypes.c_void_p(), ctypes.c_void_p()
        data = json.dumps({name: found[name] for name in ("format", "parser", "begin")}).encode()
        if self._library.kvedge_chat_open(data, ctypes.byref(self._parser), ctypes.byref(why)):
            raise LibraryError(f"the parser for the model's answers cannot be read: "
            f"{template_worker.taken(self._library, why)}")
        dropped.add(self, functools.partial(self._library.kvedge_chat_close, self._parser))

    def read(self, text: str, partial: bool = False) -> ParsedAnswer | None:
        """Reads an answer. partial: the text may continue. Returns None for an answer that is not in this dialect."""
        data, answer = text.encode("utf-8", "replace"), ctypes.c_void_p()
        failed = self._library.kvedge_chat_read(self._parser, data, len(data), partial, ctypes.byref(answer))
        found = template_worker.taken(self._library, answer)
        if failed:
            return None
        parsed = json.loads(found)
        calls = tuple(Call(call["name"], call["arguments"], call["id"]) for call in parsed["tool_calls"])
        return ParsedAnswer(parsed["content"], parsed["reasoning_content"], calls)


class Dialects:
    """The dialects of a model's chat template, one per list of tools. Thread-safe."""

    def __init__(self, model: Vocabulary, source: str, fits: Callable[[Dialect], bool] = lambda _: True) -> None:
        """source: the template. fits: whether a dialect's grammar can be used; otherwise the dialect has no grammar."""
        self._model, self._fits = model, fits
        self._sandbox = Sandbox(source, model.special_text("bos"), model.special_text("eos"))
        self._found: OrderedDict[str, Dialect | None] = OrderedDict()
        self._lock = threading.Lock()
        self.knows_tools = "tools" in source
        self.knows_thinking = "enable_thinking" in source  # a variable that many templates share

    def knows(self, request: Mapping[str, Any]) -> bool:
        """Returns whether the dialect of a request is cached, so `of` returns at once."""
        return json.dumps(request) in self._found

    def of(self, request: Mapping[str, Any]) -> Dialect | None:
        """Returns the dialect of answers to a request (`request_for`), or None if the template has none that is usable.
        """
        name = json.dumps(request)
        with contextlib.suppress(KeyError):
            return self._found[name]  # no lock here: a search holds the lock for a long time
        with self._lock:
            if name not in self._found:
                self._found[name] = self._find(request)
                if len(self._found) > _MOST:
                    self._found.popitem(last=False)
            return self._found[name]

    def _find(self, request: Mapping[str, Any]) -> Dialect | None:
        try:
            dialect = Dialect(self._sandbox.describe(request), self._model)
            if dialect.grammar and not self._fits(dialect):
                dialect.grammar = ""
            return dialect
        except (ValueError, KvedgeError, OSError):  # the template writes the prompt too, and fails there with a message
            return None


def request_for(
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    several: bool,
    values: Mapping[str, Any],
    reasoning: str,
    after_tool: bool,
) -> dict[str, Any]:
    """Makes the request of `Dialects.of`. Its messages are short, because answers to other messages begin alike.

    choice: "auto", "required" or "none". several: several calls at once. values: variables for the template. reasoning:
    llama.cpp's "auto" or "none". after_tool: the last message is from a tool.
    """
    messages: list[dict[str, Any]] = [_QUESTION]
    if after_tool:
        name = tools[0]["function"]["name"] if tools else "tool"
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": "{}"}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]},
                     {"role": "tool", "content": "?", "tool_call_id": "call00000", "name": name}]  # fmt: skip
    return {
        "messages": messages,
        "tools": list(tools),
        "tool_choice": choice,
        "parallel_tool_calls": several,
        "values": dict(values),
        "reasoning_format": reasoning,
        "enable_thinking": values.get("enable_thinking", True) is not False,
    }


def _library() -> ctypes.CDLL:
    try:
        return template_worker.chat_library(chat_path())
    except OSError as error:
        raise LibraryError(f"libkvedge-chat cannot be loaded: {error}") from None
