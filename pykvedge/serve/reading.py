"""Parses an answer while it is written, into text, reasoning and tool calls.

A dialect's answer (models/dialect.py) goes through llama.cpp's parser. A model that learns of tools from the system
prompt, or whose call is forced by a schema, writes JSON (serve/tools.py). Other answers are text.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pykvedge.errors import RequestError
from pykvedge.models.dialect import Call, Dialect, ParsedAnswer
from pykvedge.runtime.generation import mark_begun
from pykvedge.serve import tools as calling
from pykvedge.serve.asking import text_of
from pykvedge.serve.wire import ChatRequest

_REST = 4  # after parsing, the parser rests four times as long
LONG = 20_000  # characters whose parsing takes some milliseconds
_FENCE = "```"
_MARKS = ("<tool_call>", _FENCE)
_BEGINS = re.compile("|".join(_MARKS))
_FENCED = re.compile(r"```(?:json)?\s*(?=[{\[])")
_FENCE_BEGUN = re.compile(r"```(?:j|js|jso|json)?\s*")


@dataclass(frozen=True)
class Delta:
    """The next part of an answer: reasoning, text, or a part of a tool call's arguments.

    call: number of the tool call, from 0 on; -1: no call. Only the first part of a call has id and name.
    """

    text: str = ""
    reasoning: str = ""
    call: int = -1
    id: str = ""
    name: str = ""
    arguments: str = ""


class Reading:
    """Parses an answer piece by piece. This base class treats the whole answer as text.

    parsed: sum of all deltas so far; its calls have ids. is_long: the next parsing may block the event loop noticeably.
    """

    is_long = False

    def __init__(self) -> None:
        self.parsed = ParsedAnswer()

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of text. Returns what became certain."""
        self.parsed = replace(self.parsed, text=self.parsed.text + text)
        return [Delta(text)]

    def finish(self, text: str = "") -> list[Delta]:
        """Takes the last piece of text. Returns the rest. Raises RequestError if a call that was begun is invalid."""
        return self.feed(text) if text else []


def reading(given: ChatRequest, dialect: Dialect | None) -> Reading:
    last = given.messages[-1]
    if dialect is not None:
        return Parsed(dialect, "\n".join(map(text_of, last.parts)) if last.role == "assistant" else "")
    tools = calling.offered(given)
    return JsonCallReading({tool.function.name for tool in tools}) if tools else Reading()


class Parsed(Reading):
    """Parses an answer in a dialect. llama.cpp's parser reads the whole answer again with each piece."""

    def __init__(self, dialect: Dialect, begun: str = "", clock: Callable[[], float] = time.perf_counter) -> None:
        """begun: beginning of the answer from the request, which is not part of the deltas."""
        super().__init__()
        self._dialect, self._clock, self._text = dialect, clock, begun
        self._due = 0.0
        self._before = (dialect.read(begun, True) or ParsedAnswer(begun)) if begun else ParsedAnswer()

    @property
    def is_long(self) -> bool:  # type: ignore[override]
        return len(self._text) > LONG

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        began = self._clock()
        if began < self._due:
            return []
        found = self._dialect.read(self._text, True)
        ended = self._clock()
        self._due = ended + _REST * (ended - began)
        return self._deltas(self._without(found), whole=False) if found is not None else []

    def finish(self, text: str = "") -> list[Delta]:
        self._text += text
        found = self._dialect.read(self._text)
        if found is None:
            if self.parsed.calls:
                raise RequestError(
                    500, "the model began a tool call, but its text is not a valid tool call; try again", "invalid_call"
                )
            found = self._unread()
        return self._deltas(self._without(found), whole=True)

    def _unread(self) -> ParsedAnswer:
        """Returns an answer that breaks the dialect: its longest valid beginning, and the rest as text."""
        text, found = self._text, ParsedAnswer()
        fits, fails = 0, len(text)
        while fails - fits > 1:  # binary search for the longest valid beginning
            middle = (fits + fails) // 2
            parsed = self._dialect.read(text[:middle])
            if parsed is None:
                fails = middle
            else:
                fits, found = middle, parsed
        at = text.find(found.reasoning) + len(found.reasoning) if found.reasoning else 0
        at = text.find(found.text, at) + len(found.text) if found.text else at
        return ParsedAnswer(found.text + text[at:], found.reasoning)

    def _without(self, found: ParsedAnswer) -> ParsedAnswer:
        before = self._before
        text, reasoning = found.text.removeprefix(before.text), found.reasoning.removeprefix(before.reasoning)
        return ParsedAnswer(text, reasoning, found.calls)

    def _deltas(self, found: ParsedAnswer, whole: bool) -> list[Delta]:
        """Returns deltas for new parts. A part that contradicts earlier deltas waits. whole: the answer is complete."""
        deltas = []
        reasoning, text = _added(self.parsed.reasoning, found.reasoning), _added(self.parsed.text, found.text)
        if reasoning:
            deltas.append(Delta(reasoning=reasoning))
        if text:
            deltas.append(Delta(text))
        calls = list(self.parsed.calls)
        for i, call in enumerate(found.calls):
            if i == len(calls):
                if not call.name or not (call.arguments or whole or i + 1 < len(found.calls)):
                    break  # the name may be incomplete
                calls.append(Call(call.name, "", call.id or new_id()))
                deltas.append(Delta(call=i, id=calls[i].id, name=call.name))
            if arguments := _added(calls[i].arguments, call.arguments):
                calls[i] = Call(calls[i].name, calls[i].arguments + arguments, calls[i].id)
                deltas.append(Delta(call=i, arguments=arguments))
        self.parsed = ParsedAnswer(self.parsed.text + text, self.parsed.reasoning + reasoning, tuple(calls))
        if whole and not _agree(self.parsed, found):
            raise RequestError(
                500,
                "the end of the model's answer contradicts the parts that were already sent; try again without stream",
                "invalid_call",
            )
        return deltas


class JsonCallReading(Reading):
    """Parses an answer with calls as JSON. Holds back text that may be a call until that is decided."""

    def __init__(self, names: set[str]) -> None:
        """names: of the tools."""
        super().__init__()
        self._names, self._waits, self._begun = names, "", False

    def feed(self, text: str) -> list[Delta]:
        self._waits += text
        return self._next(False)

    def finish(self, text: str = "") -> list[Delta]:
        self._waits += text
        return self._next(True)

    def _next(self, over: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if not self._begun and (start := self._waits.lstrip()):
            if start[0] in "{[" and not over:
                return []  # the whole answer may be a call
            self._begun = True
            if start[0] in "{[" and (calls := calling.calls_of(start.rstrip(), self._names)):
                self._waits = ""
                return self._call(calls)
        while self._waits:
            n, calls = self._step(over)
            if n == 0:
                break
            if not calls:
                deltas += super().feed(self._waits[:n])
            else:
                deltas += self._call(calls)
            self._waits = self._waits[n:]
        return deltas

    def _step(self, over: bool) -> tuple[int, list[Call]]:
        """Returns a number of waiting characters, and the calls in them; no calls: they are text. 0: undecided."""
        waits = self._waits
        mark = _BEGINS.search(waits)
        if mark is None:
            return len(waits) - (0 if over else mark_begun(waits, _MARKS)), []
        if mark.start():
            return mark.start(), []
        start, closed = len(mark[0]), "</tool_call>"
        if mark[0] == _FENCE:
            fenced, closed = _FENCED.match(waits), _FENCE
            if fenced is None:
                return (0 if not over and _FENCE_BEGUN.fullmatch(waits) else start), []
            start = fenced.end()
        end = waits.find(closed, start)
        if end < 0 and not over:
            return 0, []
        calls = calling.calls_of(waits[start : end if end >= 0 else len(waits)], self._names)
        if not calls:
            return len(mark[0]), []
        return (end + len(closed) if end >= 0 else len(waits)), calls

    def _call(self, calls: list[Call]) -> list[Delta]:
        deltas = []
        for call in calls:
            made = Call(call.name, call.arguments, new_id())
            deltas.append(Delta(call=len(self.parsed.calls), id=made.id, name=made.name, arguments=made.arguments))
            self.parsed = ParsedAnswer(self.parsed.text, "", (*self.parsed.calls, made))
        return deltas


def new_id() -> str:
    """Returns a new id of a tool call. The result of the call will name this id."""
    return f"call_{secrets.token_hex(12)}"


def _added(sent: str, found: str) -> str:
    return found[len(sent) :] if found.startswith(sent) else ""


def _agree(sent: ParsedAnswer, found: ParsedAnswer) -> bool:
    """Returns whether all deltas together equal the sent answer, except blanks at the end of a text."""
    texts = ((sent.text, found.text), (sent.reasoning, found.reasoning))
    if not all(one == other or one.rstrip() == other.rstrip() for one, other in texts):
        return False
    return [(call.name, call.arguments) for call in sent.calls] == [(call.name, call.arguments) for call in found.calls]
