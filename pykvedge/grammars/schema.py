"""Prepares a JSON schema for llguidance, which obeys a schema or reports what it cannot obey.

Refuses or tightens the keywords that llguidance accepts without obeying them in every case.
"""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from pykvedge.errors import GrammarError

_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,60}",  # bounded: a model may write blanks without end
    "json_allow_general_unicode_escapes": False,  # an escaped property name would be another name
}
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-(?:0[13-9]|1[0-2])-[0-3][0-9]|{_YEAR}-02-(?:[01][0-9]|2[0-8])|{_LEAP}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_LABEL = "[a-zA-Z0-9]+(?:-[a-zA-Z0-9]+)*"
# only existing days, no leap seconds, no encoded host names: llguidance's formats accept more
_FORMATS = {
    "date": {"pattern": f"^{_DATE}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}"},
    "time": {"pattern": f"^{_TIME}"},
    "hostname": {"pattern": rf"^(?:{_LABEL}\.)*{_LABEL}$", "maxLength": 253},
}
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # map names to schemas
_DATA = ("const", "enum", "default", "examples")  # contain no schema
_APPLIED = {"allOf", "anyOf", "oneOf", "$ref", "dependentSchemas"}
_OBJECT = {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_UNHEEDED = ("deprecated", "contentSchema", "$vocabulary")  # do not restrict values


# larger values take llguidance long: it compares patterns in pairs, and intersects them
_MAX_PATTERNS, _MAX_PROPERTIES, _LARGEST_MULTIPLE = 8, 2000, 10_000


def prepared(schema: str) -> str:
    """Returns a schema's JSON text for llguidance. Raises GrammarError for keywords that llguidance does not obey."""
    root = json.loads(schema)
    schemas = list(_schemas(root))
    apart = not any(one.keys() & _APPLIED and (one.keys() & _OBJECT or "allOf" in one) for one, _ in schemas)
    if not apart:
        _check_common(schemas)
    for one, _ in schemas:
        _check(one)
        _change(one)
        if apart:
            _close(one)
    root["x-guidance"] = _OPTIONS
    return json.dumps(root)


def below(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Copies a schema to a place inside another schema, such as "#/properties/a". Adjusts references to its root."""
    out = copy.deepcopy(schema)
    for one, _ in _schemas(out):
        if isinstance(ref := one.get("$ref"), str) and ref.startswith("#"):
            one["$ref"] = place + ref[1:]
    return out


def _schemas(root: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields a schema and all schemas inside it, also unused definitions, each with the name of its property."""
    stack: list[tuple[Any, str, bool]] = [(root, "", True)]
    while stack:
        one, name, is_schema = stack.pop()
        if isinstance(one, list):
            stack += [(value, name, True) for value in one]
        elif isinstance(one, dict) and is_schema:
            yield one, name
            for key, value in one.items():
                if key not in _DATA:
                    stack.append((value, name if key in _APPLIED else "", key not in _NAMED))
        elif isinstance(one, dict):
            stack += [(value, key, True) for key, value in one.items()]


def _check_common(schemas: list[tuple[dict[str, Any], str]]) -> None:
    """Raises GrammarError if several schemas of one value together are too much for llguidance."""
    texts, factors = defaultdict[str, set[str]](set), defaultdict[str, int](lambda: 1)
    for one, name in schemas:
        texts[name].update(f"{word} {one[word]}" for word in ("pattern", "format") if isinstance(one.get(word), str))
        factors[name] = math.lcm(factors[name], _digits(one.get("multipleOf")))
    if any(len(found | texts[""]) > _MAX_PATTERNS for found in list(texts.values())):
        raise GrammarError(f"more than {_MAX_PATTERNS} patterns for one text are not supported")
    if any(math.lcm(factor, factors[""]) > _LARGEST_MULTIPLE for factor in list(factors.values())):
        raise GrammarError("several multipleOf for one number are not supported")


def _digits(multiple: Any) -> int:
    """Returns a number's digits without point and without outer zeros, as an integer."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple or multiple != multiple:
        return 1
    text = format(Decimal(str(abs(multiple))), "f") if abs(multiple) < 1e300 else "1"
    return int(text.replace(".", "").strip("0") or 1)


def _check(one: dict[str, Any]) -> None:
    patterns, named = one.get("patternProperties"), one.get("properties")
    if isinstance(patterns, dict) and len(patterns) > _MAX_PATTERNS:
        raise GrammarError(f"more than {_MAX_PATTERNS} patternProperties are not supported")
    if isinstance(named, dict) and len(named) > _MAX_PROPERTIES:
        raise GrammarError(f"an object with more than {_MAX_PROPERTIES} properties is not supported")
    if _digits(one.get("multipleOf")) > _LARGEST_MULTIPLE:
        raise GrammarError(f"a multipleOf with more digits than {_LARGEST_MULTIPLE} is not supported")
    least, required = one.get("minProperties"), one.get("required")
    if isinstance(least, int) and least > 1 + (len(required) if isinstance(required, list) else 0):
        raise GrammarError("minProperties above 1 is not supported, because the model may write other properties twice")
    for name in ("const", "enum"):
        if not all(number == int(float(number)) for number in _integers(one.get(name)) if abs(number) < 1e300):
            raise GrammarError(f"{name} has a number with too many digits")


def _integers(value: Any) -> list[int]:
    stack, out = [value], list[int]()
    while stack:
        one = stack.pop()
        if isinstance(one, dict | list):
            stack += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int):
            out.append(one)
    return out


def _inside(bound: Any, towards: float) -> Any:
    """Returns the float nearest to an integer bound, not beyond the bound, because llguidance uses floats."""
    if not isinstance(bound, int) or isinstance(bound, bool) or abs(bound) > 1e300 or int(float(bound)) == bound:
        return bound
    near = float(bound)
    return near if (int(near) > bound) == (towards > 0) else math.nextafter(near, towards)


def _change(one: dict[str, Any]) -> None:
    for name in (*_UNHEEDED, *(["uniqueItems"] if one.get("uniqueItems") is False else [])):
        one.pop(name, None)
    for name in _BOUNDS & one.keys():
        one[name] = _inside(one[name], math.inf if "inimum" in name else -math.inf)
    alternatives = one.get("oneOf")
    if isinstance(alternatives, list):  # written-out types show llguidance which alternatives exclude each other
        one["oneOf"] = [{"type": _TYPES, **a} if isinstance(a, dict) and "$ref" in a else a for a in alternatives]
    name, others = one.get("format"), one.get("allOf", [])
    if isinstance(name, str) and name in _FORMATS and isinstance(others, list):
        one["allOf"] = [*others, _FORMATS[name]]


def _close(one: dict[str, Any]) -> None:
    """Forbids unnamed properties of an object, so that the model does not invent any."""
    named, required = one.get("properties"), one.get("required", [])
    if isinstance(named, dict) and not one.keys() & {"patternProperties", "additionalProperties", "const", "enum"}:
        one.setdefault("type", "object")
        if isinstance(required, list) and all(isinstance(name, str) and name in named for name in required):
            one["additionalProperties"] = False
