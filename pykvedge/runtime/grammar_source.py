"""Grammars and JSON schemas as they are given: as text, as a file, or as what JSON is in Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pykvedge.errors import GrammarError

MOST = 1 << 20  # bytes


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
    try:
        if not isinstance(json.loads(_checked("JSON schema", text)), dict):
            raise GrammarError('the JSON schema is no object, as {"type": "string"} is')
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"the JSON schema is no JSON: {error}") from None
    return text


def _read(what: str, given: object) -> str:
    if not isinstance(given, str | os.PathLike):
        raise GrammarError(f"a {what} is text or a file, not {given!r:.40}")
    name = f"{os.fspath(given)!s:.60}"
    try:
        with Path(os.fsdecode(given)).open("rb") as file:
            return file.read(MOST + 1).decode("utf-8")
    except UnicodeDecodeError:
        raise GrammarError(f"{name} is no {what}: it is not text") from None
    except OSError as error:
        raise GrammarError(f"the {what} {name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise GrammarError(f"the {what} {name} cannot be read: {error}") from None


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
