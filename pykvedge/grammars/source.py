"""Grammars, JSON schemas and regular expressions as they are given: text, a file, or what JSON is in Python."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pykvedge.errors import GrammarError

MOST = 1 << 20  # bytes


@dataclass(frozen=True)
class Lazy:
    """A grammar that an answer follows from a trigger on. Before it the answer is free.

    grammar: GBNF, from its rule `root` on. Without words, patterns and tokens it holds from the first token on.
    words: texts. The grammar begins with the word.
    patterns: regular expressions, searched in the text. The grammar begins with the first group that is not empty, or
    with the match where there is none.
    tokens: token numbers. The grammar begins with that token.
    preserved: numbers of special tokens that stand for their text, in triggers and in literals of the grammar.
    prefix: text at the end of the prompt that counts as the beginning of the answer.
    thinking: the marks around text in which no trigger counts.
    """

    grammar: str
    words: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    preserved: tuple[int, ...] = ()
    prefix: str = ""
    thinking: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises GrammarError."""
        try:
            re.compile("|".join(f"(?:{pattern})" for pattern in self.patterns))
        except re.error as error:
            raise GrammarError(f"a pattern that begins a grammar is none: {error}") from None

    @property
    def waits(self) -> bool:
        """Tells whether the grammar has a trigger to wait for."""
        return bool(self.words or self.patterns or self.tokens)

    def thinks(self, text: str) -> bool:
        """Tells whether a text ends in what is thought."""
        return self.thinking is not None and text.rfind(self.thinking[0]) > text.rfind(self.thinking[1])

    def begins(self, text: str) -> int | None:
        """Returns where in a text, an answer's so far, the grammar begins; None while no trigger is there."""
        if not self.waits:
            return 0
        if self.thinks(text):
            return None
        closing = self.thinking[1] if self.thinking else ""
        start = text.rfind(closing) + len(closing) if closing in text and closing else 0
        found = [at for word in self.words if (at := text.find(word, start)) >= 0]
        for pattern in self.patterns:
            match = re.compile(pattern).search(text, start)
            if match is not None:
                found.append(next((match.start(i + 1) for i, one in enumerate(match.groups()) if one), match.start()))
        return min(found, default=None)


def is_grammar(text: str) -> bool:
    """Tells a grammar from the name of a file: it has a rule."""
    return "::=" in text


def is_schema(text: str) -> bool:
    """Tells a JSON schema from the name of a file: it is an object."""
    return text.lstrip()[:1] == "{"


def grammar(given: object) -> str:
    """Returns the text of a grammar (GBNF), which is given so or as a file. Raises GrammarError."""
    text = given if isinstance(given, str) and is_grammar(given) else _read("grammar", given)
    if not is_grammar(text):
        raise GrammarError("the grammar has no rule: write one in GBNF, for example root ::= \"yes\" | \"no\"")
    return _checked("grammar", text)


def schema(given: object) -> str:
    """Returns a JSON schema as text, which is given so, as a file, or as a dict. Raises GrammarError."""
    if isinstance(given, Mapping):
        try:
            text = json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is no JSON: {error}") from None
    else:
        text = given if isinstance(given, str) and is_schema(given) else _read("JSON schema", given)
    _checked("JSON schema", text)
    try:
        found = json.loads(text)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"the JSON schema is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise GrammarError('the JSON schema is no object, as {"type": "string"} is')
    return text


def regex(given: object) -> str:
    """Returns a regular expression, which is given as text. Raises GrammarError."""
    if not isinstance(given, str) or not given:
        raise GrammarError(f"a regular expression is text, not {given!r:.40}")
    if (len(given) - len(given.rstrip("\\"))) % 2:
        raise GrammarError("the regular expression ends in a backslash")
    return _checked("regular expression", given)


def _read(what: str, given: object) -> str:
    if not isinstance(given, str | os.PathLike):
        raise GrammarError(f"a {what} is text or a file, not {given!r:.40}")
    if not os.fspath(given):
        raise GrammarError(f"the {what} is empty; give it as text, or name its file")
    name = f"{os.fspath(given)!s:.60}"
    try:
        with Path(os.fsdecode(given)).open("rb") as file:
            return file.read(MOST + 1).decode("utf-8")
    except UnicodeDecodeError:
        raise GrammarError(f"{name} is no {what}: it is not text") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise GrammarError(f"the {what} {name} cannot be read: {why}") from None


def _checked(what: str, text: str) -> str:
    if "\0" in text:
        raise GrammarError(f"the {what} has a character 0 in it")
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError(f"the {what} has characters that are none") from None
    if n_bytes > MOST:
        raise GrammarError(f"the {what} is larger than {MOST >> 20} MiB")
    return text
