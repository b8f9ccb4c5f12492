"""Answers obey a JSON schema, or the schema is refused. `jsonschema`, another implementation, checks random answers.

experiments/check_schemas.py checks the whole JSON Schema test suite.
"""

import json
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from choosing import whole

from pykvedge import GrammarError, Sampling
from pykvedge.models.model import Model
from pykvedge.runtime.grammar import Grammar

_LONGEST = 400  # tokens
_CLOSING = (b'"', b"}", b"]", b",", b":", b"0", b"a", b"-", b"@", b".")

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}
UNION = {
    "$defs": {
        "cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                "required": ["kind", "lives"]},
        "dog": {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}},
                "required": ["kind"]},
    },
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "discriminator": {"propertyName": "kind"},
}  # fmt: skip
OBEYED = [
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 0, "maximum": 18446744073709551615},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 500},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 100},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "date", "pattern": "^2024-02-2"},
    {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    {"type": "string", "pattern": r"^\w+$", "maxLength": 8},
    {"type": "string", "pattern": "b+"},
    {"type": "string", "pattern": r'^"\\\s/$'},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"enum": ["red", 3, None, {"a": [1]}, 0.5, 'a "quoted" \\ text\n']},
    {"const": {"a": [True, None], "\u00e9": "\U0001f999"}},
    {"type": ["integer", "null"]},
    {"type": "array", "items": True, "maxItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
    {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "object", "properties": {"const": {"enum": [1]}, "format": {"const": "date"}}, "required": ["const"]},
    {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]},
    {"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "null"}}}],
     "type": "object"},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 5}]},
    {"type": "string", "deprecated": True, "title": "x", "x-guidance": {"lenient": True}, "pattern": "^a$"},
    {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "maxItems": 3},
    TREE,
    UNION,
]  # fmt: skip
REFUSED = [
    ({"not": {"type": "string"}}, '"not"'),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"if"'),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "overlap"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}], "x-guidance": {"coerce_one_of": True}}, "overlap"),
    ({"type": "string", "format": "telephone"}, "telephone"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"const": 12345678901234567891}, "digits"),
    ({"$ref": "https://localhost:9/schema.json"}, "localhost"),
    ({"$ref": "#/$defs/nothing"}, "nothing"),
    ({"$ref": "#"}, "no token of the model fits"),
    ({"type": "string", "pattern": "(?=a)b"}, "regex"),
    ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf"),
    ({"allOf": [{"type": "string", "pattern": f"{i}"} for i in range(20)]}, "patterns"),
    ({"type": "object", "patternProperties": {f"^{i}x": True for i in range(300)}}, "patternProperties"),
    ({"type": "integer", "multipleOf": 999983}, "multipleOf"),
]


def walk(grammar: Grammar, model: Model, rng: random.Random) -> bytes | None:
    """Draws a random answer. Returns None for an answer without an end."""
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
    """Returns the first violation in an answer, "" if the answer obeys."""
    import jsonschema

    validator = jsonschema.validators.validator_for(schema)
    check = validator(schema, format_checker=validator.FORMAT_CHECKER)
    value = json.loads(text)
    for error in check.iter_errors(value):
        if error.validator == "multipleOf" and not Decimal(str(error.instance)) % Decimal(str(error.validator_value)):
            continue  # in floats, 19.99 is not a multiple of 0.01
        return str(error.message)
    return ""


def judge(schema: dict[str, Any], model: Model, seed: int, n: int = 4) -> tuple[str, str]:
    """Returns "obeyed", "refused" or "violated" for a schema, and the reason."""
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


@pytest.mark.parametrize("kind", ["qwen2vl", *whole("llama")])
def test_answers_obey(tiny, kind):
    with tiny(kind).session() as session:
        for i, schema in enumerate(OBEYED):
            assert judge(schema, session.model, i, 3) == ("obeyed", ""), schema


@pytest.mark.parametrize(("schema", "word"), REFUSED)
def test_what_cannot_be_obeyed_is_refused(session, schema, word):
    with pytest.raises(GrammarError, match="the JSON schema") as error:
        session.ask("Hello", sampling=Sampling(json_schema=schema))
    assert word in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400
    assert not session.messages
