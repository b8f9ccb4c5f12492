"""Reads grammars, JSON schemas and regular expressions, given as text, as a file, or as Python objects."""

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
    """A grammar that holds from a trigger on. The answer before the trigger is free.

    grammar: GBNF, from rule `root` on. Without words, patterns and tokens the grammar holds from the first token on.
    words: trigger texts. The grammar begins with the word.
    patterns: regular expressions as triggers. The grammar begins with the first non-empty group, or with the match if
    no group matches.
    tokens: trigger token ids. The grammar begins with the token.
    preserved: ids of special tokens that count as their text, in triggers and in literals of the grammar.
    prefix: text at the end of the prompt that counts as the beginning of the answer.
    thinking: begin and end marks of text in which triggers do not count.
    """

    grammar: str
    words: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    preserved: tuple[int, ...] = ()
    prefix: str = ""
    thinking: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises GrammarError for an invalid pattern."""
        try:
            re.compile("|".join(f"(?:{pattern})" for pattern in self.patterns))
        except re.error as error:
            raise GrammarError(f"the trigger pattern of a grammar is not a regular expression: {error}") from None

    @property
    def waits(self) -> bool:
        """Returns whether the grammar has a trigger."""
        return bool(self.words or self.patterns or self.tokens)

    def thinks(self, text: str) -> bool:
        """Returns whether the text ends inside thinking marks."""
        return self.thinking is not None and text.rfind(self.thinking[0]) > text.rfind(self.thinking[1])

    def begins(self, text: str) -> int | None:
        """Returns the index in the answer's text where the grammar begins, or None before a trigger."""
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
    """Returns whether a text is a grammar (it has a rule), not the name of a file."""
    return "::=" in text


def is_schema(text: str) -> bool:
    """Returns whether a text is a JSON schema (it is an object), not the name of a file."""
    return text.lstrip()[:1] == "{"


def grammar(given: object) -> str:
    """Returns the text of a GBNF grammar, given as text or as a file. Raises GrammarError."""
    text = given if isinstance(given, str) and is_grammar(given) else _read("grammar", given)
    if not is_grammar(text):
        raise GrammarError("the grammar has no rule: write one in GBNF, for example root ::= \"yes\" | \"no\"")
    return _checked("grammar", text)


def schema(given: object) -> str:
    """Returns the text of a JSON schema, given as text, as a file, or as a dict. Raises GrammarError."""
    if isinstance(given, Mapping):
        try:
            text = json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not JSON: {error}") from None
    else:
        text = given if isinstance(given, str) and is_schema(given) else _read("JSON schema", given)
    _checked("JSON schema", text)
    try:
        found = json.loads(text)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise GrammarError('the JSON schema must be an object, for example {"type": "string"}')
    return text


def regex(given: object) -> str:
    """Checks a regular expression, given as text, and returns it. Raises GrammarError."""
    if not isinstance(given, str) or not given:
        raise GrammarError(f"a regular expression must be text, not {given!r:.40}")
    if (len(given) - len(given.rstrip("\\"))) % 2:
        raise GrammarError("the regular expression ends in a backslash")
    return _checked("regular expression", given)


def _read(what: str, given: object) -> str:
    if not isinstance(given, str | os.PathLike):
        raise GrammarError(f"a {what} must be text or a file, not {given!r:.40}")
    if not os.fspath(given):
        raise GrammarError(f"the {what} is empty; give the {what} as text, or name a file")
    name = f"{os.fspath(given)!s:.60}"
    try:
        with Path(os.fsdecode(given)).open("rb") as file:
            return file.read(MOST + 1).decode("utf-8")
    except UnicodeDecodeError:
        raise GrammarError(f"{name} is not a {what}: the file is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise GrammarError(f"the {what} {name} cannot be read: {why}") from None


def _checked(what: str, text: str) -> str:
    if "\0" in text:
        raise GrammarError(f"the {what} contains a zero byte")
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError(f"the {what} contains invalid characters (lone surrogates)") from None
    if n_bytes > MOST:
        raise GrammarError(f"the {what} is larger than {MOST >> 20} MiB")
    return text
