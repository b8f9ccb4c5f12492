#!/usr/bin/env python3
"""Holds random answers to the schemas of the JSON Schema test suite, and has `jsonschema` say whether they obey.

    python3 scripts/check_schemas.py MODEL.gguf JSON-Schema-Test-Suite/tests

The folder is that of https://github.com/json-schema-org/JSON-Schema-Test-Suite; the source package of `jsonschema` has
it as json/tests. A schema is obeyed, refused, or violated; the exit code is 1 if one is violated. Of an answer each
token is drawn from those that may come, so the model is asked nothing: its vocabulary is enough.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from pykvedge import GrammarError, Sampling
from pykvedge.models.model import Model
from pykvedge.runtime.grammar import Grammar

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_OTHER_REGEX = ("ecmascript-regex",)  # Python's regular expressions, which jsonschema asks, are not JavaScript's
_LONGEST = 400  # tokens
_CLOSING = (b'"', b"}", b"]", b",", b":", b"0", b"a", b"-", b"@", b".")


def walk(grammar: Grammar, model: Model, rng: random.Random) -> bytes | None:
    """Draws an answer. Returns None for one that has no end yet."""
    unseen = next(token for token in range(model.n_vocab) if model.is_unseen(token) and not model.is_end(token))
    closing = np.array([model.piece(token) in _CLOSING for token in range(model.n_vocab)])
    ends = np.array([model.is_end(token) for token in range(model.n_vocab)])
    said = b""
    for _ in range(_LONGEST):
        possible = grammar.take(unseen)
        if possible is None:
            raise AssertionError("a token that is never part of an answer was taken")
        if possible[ends].any() and (rng.random() < 0.4 or not possible[~ends].any()):
            return said
        likely = np.flatnonzero(possible & closing & ~ends)
        token = int(rng.choice(likely if len(likely) and rng.random() < 0.6 else np.flatnonzero(possible & ~ends)))
        if grammar.take(token) is not None:
            raise AssertionError("a token that may come was not taken")
        said += model.piece(token)
    return None


def fault(schema: dict[str, Any], text: bytes) -> str:
    """Says what is wrong with an answer; nothing if it obeys."""
    validator = jsonschema.validators.validator_for(schema)
    check = validator(schema, format_checker=validator.FORMAT_CHECKER)
    value = json.loads(text)
    for error in check.iter_errors(value):
        if error.validator == "multipleOf" and not Decimal(str(error.instance)) % Decimal(str(error.validator_value)):
            continue  # in floats 19.99 is no multiple of 0.01
        return str(error.message)
    return ""


def judge(schema: dict[str, Any], model: Model, seed: int, n: int = 4) -> tuple[str, str]:
    """Returns "obeyed", "refused" or "violated" for a schema, and why."""
    rng, whole = random.Random(seed), 0
    for _ in range(n):
        try:
            text = walk(Grammar(Sampling(json_schema=schema), model), model, rng)
        except GrammarError as error:
            return "refused", str(error)
        if text is None:
            continue
        whole += 1
        try:
            if why := fault(schema, text):
                return "violated", f"{text.decode('utf-8', 'replace')}: {why}"
        except ValueError as error:
            return "violated", f"{text!r}: {error}"
    return ("obeyed", "") if whole else ("endless", "")


def schemas(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lists the schemas of the suite that are objects."""
    for draft, uri in DRAFTS.items():
        for file in sorted((folder / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                if isinstance(case["schema"], dict) and file.stem not in _OTHER_REGEX:
                    yield f"{draft}/{file.stem}/{case['description']}", {"$schema": uri, **case["schema"]}


def main() -> int:
    options = argparse.ArgumentParser(description="Holds random answers to the schemas of a test suite.")
    options.add_argument("model", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--show", action="store_true", help="say of each schema that is refused, why")
    given = options.parse_args()
    model = Model(given.model, vocabulary_only=True)
    counts: Counter[str] = Counter()
    for i, (name, schema) in enumerate(schemas(given.folder)):
        verdict, why = judge(schema, model, i)
        counts[verdict] += 1
        if verdict == "violated" or (given.show and verdict != "obeyed"):
            print(f"{verdict}: {name}: {why}")
    print(dict(counts))
    return int(counts["violated"] > 0)


if __name__ == "__main__":
    sys.exit(main())
