"""A JSON schema is made ready for llguidance, which obeys a schema or says what of it it cannot obey.

What it would take and not obey in every case is refused here, or made tighter.
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
    "json_allow_general_unicode_escapes": False,  # the name of a property would be another one
}
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-(?:0[13-9]|1[0-2])-[0-3][0-9]|{_YEAR}-02-(?:[01][0-9]|2[0-8])|{_LEAP}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_LABEL = "[a-zA-Z0-9]+(?:-[a-zA-Z0-9]+)*"
# days that there are, no leap seconds, and names of hosts that are not encoded: llguidance's own forms take in more
_FORMATS = {
    "date": {"pattern": f"^{_DATE}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}"},
    "time": {"pattern": f"^{_TIME}"},
    "hostname": {"pattern": rf"^(?:{_LABEL}\.)*{_LABEL}$", "maxLength": 253},
}
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # hold schemas by name
_DATA = ("const", "enum", "default", "examples")  # hold no schema
_APPLIED = {"allOf", "anyOf", "oneOf", "$ref", "dependentSchemas"}
_OBJECT = {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_UNHEEDED = ("deprecated", "contentSchema", "$vocabulary")  # say nothing about what is valid


# more takes llguidance long: it looks whether patterns exclude each other, and what several of them have in common
_MOST_PATTERNS, _MOST_PROPERTIES, _LARGEST_MULTIPLE = 8, 2000, 10_000


def prepared(schema: str) -> str:
    """Returns the text of a schema, which is JSON, for llguidance. Raises GrammarError for what it does not obey."""
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
    """Copies a schema, whose references lead from its own root, for a place of another schema, as "#/properties/a"."""
    out = copy.deepcopy(schema)
    for one, _ in _schemas(out):
        if isinstance(ref := one.get("$ref"), str) and ref.startswith("#"):
            one["$ref"] = place + ref[1:]
    return out


def _schemas(root: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Lists a schema and those in it, each once, also where only a $ref may lead to them, and the property's name."""
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
    """Refuses what is too much to obey at once, where several schemas may hold for a value."""
    texts, factors = defaultdict[str, set[str]](set), defaultdict[str, int](lambda: 1)
    for one, name in schemas:
        texts[name].update(f"{word} {one[word]}" for word in ("pattern", "format") if isinstance(one.get(word), str))
        factors[name] = math.lcm(factors[name], _digits(one.get("multipleOf")))
    if any(len(found | texts[""]) > _MOST_PATTERNS for found in list(texts.values())):
        raise GrammarError(f"more than {_MOST_PATTERNS} patterns that may hold for one text cannot be obeyed")
    if any(math.lcm(factor, factors[""]) > _LARGEST_MULTIPLE for factor in list(factors.values())):
        raise GrammarError("several multipleOf that may hold for one number cannot be obeyed")


def _digits(multiple: Any) -> int:
    """Returns a number without its point, and without the zeros around it."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple or multiple != multiple:
        return 1
    text = format(Decimal(str(abs(multiple))), "f") if abs(multiple) < 1e300 else "1"
    return int(text.replace(".", "").strip("0") or 1)


def _check(one: dict[str, Any]) -> None:
    patterns, named = one.get("patternProperties"), one.get("properties")
    if isinstance(patterns, dict) and len(patterns) > _MOST_PATTERNS:
        raise GrammarError(f"more than {_MOST_PATTERNS} patternProperties cannot be obeyed")
    if isinstance(named, dict) and len(named) > _MOST_PROPERTIES:
        raise GrammarError(f"an object of more than {_MOST_PROPERTIES} properties cannot be obeyed")
    if _digits(one.get("multipleOf")) > _LARGEST_MULTIPLE:
        raise GrammarError(f"a multipleOf of more digits than {_LARGEST_MULTIPLE} has cannot be obeyed")
    least, required = one.get("minProperties"), one.get("required")
    if isinstance(least, int) and least > 1 + (len(required) if isinstance(required, list) else 0):
        raise GrammarError("minProperties above 1 cannot be obeyed: names of other properties may come twice")
    for name in ("const", "enum"):
        if not all(number == int(float(number)) for number in _integers(one.get(name)) if abs(number) < 1e300):
            raise GrammarError(f"{name} has a number of more digits than can be obeyed exactly")


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
    """Returns the float nearest to a whole bound that is not beyond it: llguidance has floats."""
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
    if isinstance(alternatives, list):  # where they are written out, llguidance sees that they exclude each other
        one["oneOf"] = [{"type": _TYPES, **a} if isinstance(a, dict) and "$ref" in a else a for a in alternatives]
    name, others = one.get("format"), one.get("allOf", [])
    if isinstance(name, str) and name in _FORMATS and isinstance(others, list):
        one["allOf"] = [*others, _FORMATS[name]]


def _close(one: dict[str, Any]) -> None:
    """Lets an object have the properties that are named, and no others: no model is to think of some."""
    named, required = one.get("properties"), one.get("required", [])
    if isinstance(named, dict) and not one.keys() & {"patternProperties", "additionalProperties", "const", "enum"}:
        one.setdefault("type", "object")
        if isinstance(required, list) and all(isinstance(name, str) and name in named for name in required):
            one["additionalProperties"] = False
