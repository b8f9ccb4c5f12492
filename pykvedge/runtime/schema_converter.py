"""A JSON schema becomes a grammar by the converter that comes with llama_cpp, mended where its grammars allow no JSON.

It takes characters into texts that JSON writes as escapes, and leaves the backslashes of constants as they are.
"""

from __future__ import annotations

import json
import re
import types
from typing import Any

_BARE = '"\\' + "".join(map(chr, range(0x20)))  # in a JSON text these are never themselves
_NOT_BARE = r'"\\\x00-\x1F'
_CLASS = re.compile(r"(?<!\\)\[((?:\\.|[^\]\\])*)\]")


def convert(schema: str, converter: types.ModuleType) -> str:
    """Writes the grammar of a schema. converter: llama_cpp.llama_grammar, which is changed: not for use elsewhere.

    Raises whatever the converter raises for what it does not know.
    """
    converter.PRIMITIVE_RULES["char"].content = (
        rf'[^{_NOT_BARE}] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])'
    )
    converter.DOT = f"[^{_NOT_BARE}]"
    mended = _mended(converter.SchemaConverter)(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
    mended.visit(mended.resolve_refs(json.loads(schema), "stdin"), "")
    return mended.format_grammar()


def _mended(base: Any) -> Any:
    class Converter(base):
        def _format_literal(self, literal: str) -> str:
            text = json.dumps(json.loads(literal), ensure_ascii=False)  # models write letters, not their numbers
            return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

        def _visit_pattern(self, pattern: str, name: str) -> str:
            check_pattern(pattern)
            if "|" in pattern:  # which would part the quotes as well
                pattern = f"^({pattern.removeprefix('^').removesuffix('$')})$"
            return super()._visit_pattern(_CLASS.sub(_without_bare, pattern), name)

    return Converter


def check_pattern(pattern: str) -> None:
    """Raises ValueError for a pattern by which a text may have characters that JSON must escape, or more around it."""
    if not (pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith("\\$")):
        raise ValueError(f"the pattern {pattern:.60} must begin with ^ and end with $")
    rest = _CLASS.sub("", pattern)
    classes = [found for found in _CLASS.findall(pattern) if not found.startswith("^")]
    if re.search(r'["\x00-\x1f]|\\[\\"a-zA-Z0-9]', rest) or any(
        re.search(r"\\[a-zA-Z0-9]", one) or any(re.fullmatch(f"[{one}]", c) for c in _BARE) for one in classes
    ):
        raise ValueError(
            f"in the pattern {pattern:.60} only characters that JSON need not escape can be used, the dot, and classes "
            "of such characters, for example [0-9]"
        )


def _without_bare(found: re.Match[str]) -> str:
    return f"[^{_NOT_BARE}{found[1][1:]}]" if found[1].startswith("^") else found[0]
