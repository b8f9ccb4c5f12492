"""Translates grammars from llama.cpp's GBNF to llguidance's variant of Lark.

Each character becomes a separate lexeme. llguidance's lexer takes the longest lexeme, and all lexemes here have one
character, so the grammar has the same meaning as in llama.cpp, which only knows characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pykvedge.errors import GrammarError

DEEPEST = 500  # most nested rules, with groups; llguidance recurses this deep
_MAX_TIMES = 100_000  # most repetitions
_MOST = 20_000  # most characters in literals and classes, plus names
_SHOWN = 40  # characters of a grammar shown in an error
_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\\"\[\]-])|[^\\]", re.DOTALL)
_TIMES = re.compile(r"\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\}")
_TOKEN = re.compile(r"(!?)(?:<\[([0-9]{1,9})\]>|(<[^>\0]*>))")

Tokens = Callable[[str], list[int]]


@dataclass
class _Item:
    """An item of an alternative. text: in Lark. rule: name of the rule that the item stands for, or empty.

    times: repetition. within: names of rules inside the text.
    """

    text: str
    rule: str = ""
    times: str = ""
    within: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text + self.times


_Alternatives = list[list[_Item]]
_Named = tuple[str, list[_Item]]  # an alternative with the name of its rule


@dataclass
class _Reader:
    """Parses the text of a grammar."""

    text: str
    token_ids: Tokens
    preserved: Mapping[str, int]
    rules: dict[str, _Alternatives] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # GBNF name: Lark name
    at: int = 0
    size: int = 0

    def refuse(self, why: str) -> GrammarError:
        line = self.text.count("\n", 0, self.at) + 1
        rest = " ".join(self.text[self.at : self.at + _SHOWN].split())
        return GrammarError(f"line {line}: {why}" + (f" at {rest!r}" if rest else ""))

    def grow(self, n: int) -> None:
        self.size += n
        if self.size > _MOST:
            raise GrammarError(f"the grammar is too large: it has more than {_MOST} characters and names")

    def skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def read(self) -> None:
        self.skip(_LINES)
        while self.at < len(self.text):
            if not (name := _NAME.match(self.text, self.at)):
                raise self.refuse("expecting a name")
            self.at = name.end()
            self.skip(_SPACE)
            if not self.text.startswith("::=", self.at):
                raise self.refuse("expecting ::=")
            self.at += 3
            self.skip(_LINES)
            self.rules[self.named(name[0])] = self.alternatives()
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self.refuse("expecting a new line or the end")
            self.skip(_LINES)

    def named(self, name: str) -> str:
        return self.names.setdefault(name, "start" if name == "root" else f"r{len(self.names)}")

    def added(self, alternatives: _Alternatives) -> _Item:
        """Makes a rule of a group."""
        rule = f"g{len(self.rules)}"
        self.rules[rule] = alternatives
        return _Item(rule, rule)

    def alternatives(self) -> _Alternatives:
        """Parses the right side of a rule. Uses a stack for groups, so deep nesting does not recurse."""
        stack: list[_Alternatives] = [[[]]]
        while True:
            self.skip(_LINES if len(stack) > 1 else _SPACE)
            sign = self.text[self.at : self.at + 1]
            items = stack[-1][-1]
            if sign == "|":
                self.at += 1
                self.skip(_LINES)
                stack[-1].append([])
            elif sign == "(":
                self.at += 1
                if len(stack) > DEEPEST:
                    raise self.refuse("groups are nested too deeply")
                stack.append([[]])
            elif sign == ")" and len(stack) > 1:
                self.at += 1
                group = self.added(stack.pop())
                stack[-1][-1].append(group)
            elif sign and sign in "*+?{":
                self.repeat(items)
            elif (item := self.item(sign)) is not None:
                items.append(item)
            elif len(stack) > 1:
                raise self.refuse("expecting ')'" if sign else "the grammar ends too early")
            else:
                return stack[0]

    def item(self, sign: str) -> _Item | None:
        self.grow(1)
        if sign == '"':
            return self.literal()
        if sign == "[":
            return _Item(self.character_class())
        if sign == ".":
            self.at += 1
            return _Item("/(?s:.)/")
        if sign and sign in "<!":
            return self.token()
        if name := _NAME.match(self.text, self.at):
            self.at = name.end()
            rule = self.named(name[0])
            return _Item(rule, rule)
        return None

    def characters(self, end: str) -> list[tuple[str, bool]]:
        """Reads characters up to `end`. Returns each character, and whether it was written without an escape."""
        self.at += 1
        out = []
        while not self.text.startswith(end, self.at):
            if not (found := _CHARACTER.match(self.text, self.at)):
                raise self.refuse("unknown escape" if self.at + 1 < len(self.text) else "the grammar ends too early")
            out.append((self.unescaped(found[0]), len(found[0]) == 1))
            self.at = found.end()
        self.at += 1
        self.grow(len(out))
        return out

    def unescaped(self, text: str) -> str:
        if len(text) == 1:
            return text
        if len(text) == 2:
            return _PLAIN[text[1]]
        number = int(text[2:], 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise self.refuse("invalid character code")
        return chr(number)

    def literal(self) -> _Item:
        text = "".join(character for character, _ in self.characters('"'))
        items, at = [], 0
        while at < len(text):
            shown = next((word for word in self.preserved if text.startswith(word, at)), "")
            if shown:
                items.append(self.added([[_Item(f"<[{self.preserved[shown]}]>")], [_Item(_written(shown))]]))
            else:
                items.append(_Item(_written(text[at])))
            at += len(shown) or 1
        if len(items) == 1:
            return items[0]
        within = tuple(item.rule for item in items if item.rule)
        return _Item("(" + " ".join(map(str, items)) + ")" if items else '""', within=within)

    def character_class(self) -> str:
        negated = self.text.startswith("^", self.at + 1)
        self.at += negated
        given, ranges, i = self.characters("]"), list[str](), 0
        while i < len(given):
            first = last = given[i][0]
            if i + 2 < len(given) and given[i + 1] == ("-", True):
                last, i = given[i + 2][0], i + 2
            if first > last:
                raise self.refuse(f"the range {first}-{last} has its end before its start")
            ranges.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
            i += 1
        if not ranges and not negated:
            raise self.refuse("a character class is empty")
        return f"/[{'^' * negated}{''.join(ranges)}]/" if ranges else "/(?s:.)/"

    def token(self) -> _Item:
        if not (found := _TOKEN.match(self.text, self.at)):
            raise self.refuse("expecting a token, for example <[12]>")
        number = int(found[2]) if found[2] else self.token_ids(found[3])
        if isinstance(number, list):
            if len(number) != 1:
                raise self.refuse("the model does not have this token:")
            number = number[0]
        self.at = found.end()
        return _Item(f"<[{'^' if found[1] else ''}{number}]>")

    def repeat(self, items: list[_Item]) -> None:
        if not items:
            raise self.refuse("expecting an item before the repetition")
        sign, times = self.text[self.at], ""
        if sign != "{":
            self.at, times = self.at + 1, sign
        elif found := _TIMES.match(self.text, self.at):
            least = found[1]
            most = least if not found[2] else found[3]
            if max(len(least), len(most)) > 9 or max(int(least), int(most or 0)) > _MAX_TIMES:
                raise self.refuse(f"more than {_MAX_TIMES} repetitions")
            if most and int(most) < int(least):
                raise self.refuse("the least number of repetitions is above the largest number")
            self.at, times = found.end(), f"{{{int(least)},{most and int(most)}}}"
        else:
            raise self.refuse("expecting numbers, for example {2,3}")
        once = self.added([[items[-1]]]) if items[-1].times else items[-1]
        items[-1] = _Item('""') if times == "{0,0}" else replace(once, times="" if times == "{1,1}" else times)


def lark(text: str, tokens: Tokens, preserved: Mapping[str, int]) -> str:
    """Returns a grammar in Lark, from rule `root` on. Raises GrammarError for an invalid grammar.

    tokens: tokenizes the text of a special token. preserved: special tokens that literals may contain as text.
    """
    reader = _Reader(text, tokens, preserved)
    reader.read()
    rules = reader.rules
    for name, rule in [("root", "start"), *reader.names.items()]:
        if rule not in rules:
            raise GrammarError(f"Undefined rule identifier '{name}'")
    _turn(reader)
    # llguidance visits the rules in this order
    _reached({name: _named_in(alternatives) for name, alternatives in rules.items()}, "start", set(), DEEPEST)
    lines = {rule: (" ".join(map(str, items)) or '""' for items in rows) for rule, rows in rules.items()}
    return "\n".join(f"{rule}: {' | '.join(rows)}" for rule, rows in lines.items())


def _written(text: str) -> str:
    """Returns a text as Lark literals, one per character."""
    return " ".join(json.dumps(c, ensure_ascii=c < " " or c == "\x7f").replace("\x7f", "\\u007f") for c in text)


def _tail(items: list[_Item]) -> str:
    """Returns the name of the rule at the end of an alternative, or an empty string."""
    return items[-1].rule if items and not items[-1].times else ""


def _turn(reader: _Reader) -> None:
    """Replaces right recursion by left recursion.

    llguidance keeps every unfinished right-recursive rule, and fails after a thousand characters. A circle is a set of
    rules that end with each other. Every rule of a circle that is named elsewhere becomes a start: each way from the
    start to a rule of the circle becomes a new rule, which begins with the way to the previous rule.
    """
    rules = reader.rules
    for name, alternatives in rules.items():
        rules[name] = [one for items in alternatives for one in _written_out(items)]
    tails = {name: [_tail(items) for items in alternatives] for name, alternatives in rules.items()}
    circles = _circles({name: [tail for tail in ends if tail] for name, ends in tails.items()})
    of = {name: i for i, circle in enumerate(circles) for name in circle}
    named = {"start"}
    for name, alternatives in rules.items():
        for items in alternatives:
            inside = _tail(items) and name in of and of.get(_tail(items)) == of[name]
            named.update(_named_in([items[:-1] if inside else items]))
    for circle in circles:
        parts = [(name, items) for name in circle for items in rules[name]]
        steps = [(name, items) for name, items in parts if _tail(items) in circle]
        ends = [(name, items) for name, items in parts if _tail(items) not in circle]
        if ends:
            turned = {name: _from(reader, name, circle, steps, ends) for name in sorted(circle & named)}
            for name in circle:
                rules.pop(name)
            rules.update(turned)


def _written_out(items: list[_Item]) -> _Alternatives:
    """Splits an alternative with an optional rule at its end into two alternatives."""
    if items and items[-1].rule and items[-1].times == "?":
        return [[*items[:-1], replace(items[-1], times="")], items[:-1]]
    return [items]


def _from(reader: _Reader, first: str, circle: set[str], steps: list[_Named], ends: list[_Named]) -> _Alternatives:
    """Returns the new alternatives of a rule in a circle."""
    reader.grow(len(steps) + len(ends))
    led = {name: reader.added([]) for name in circle}
    reader.rules[led[first].rule].append([])
    for name, items in steps:
        reader.rules[led[_tail(items)].rule].append([led[name], *items[:-1]])
    return [[led[name], *items] for name, items in ends]


def _circles(edges: dict[str, list[str]]) -> list[set[str]]:
    """Returns the sets of rules that reach each other, by Kosaraju's two passes."""
    seen, back = set[str](), {name: list[str]() for name in edges}
    order = [one for name in edges if name not in seen for one in _reached(edges, name, seen)]
    for name, others in edges.items():
        for other in others:
            back[other].append(name)
    seen = set()
    circles = [set(_reached(back, name, seen)) for name in reversed(order) if name not in seen]
    return [circle for circle in circles if len(circle) > 1 or any(name in edges[name] for name in circle)]


def _reached(edges: Mapping[str, list[str]], start: str, seen: set[str], deepest: int = _MOST) -> list[str]:
    """Returns the unseen rules that `start` reaches, in postorder, and adds them to `seen`.

    Raises GrammarError for a path of more than `deepest` rules.
    """
    out, stack = list[str](), [(start, iter(edges[start]))]
    seen.add(start)
    while stack:
        rule = next((one for one in stack[-1][1] if one not in seen), None)
        if rule is None:
            out.append(stack.pop()[0])
            continue
        if len(stack) > deepest:
            raise GrammarError(f"its rules are nested too deeply: more than {deepest} levels")
        seen.add(rule)
        stack.append((rule, iter(edges[rule])))
    return out


def _named_in(alternatives: _Alternatives) -> list[str]:
    return [rule for items in alternatives for item in items for rule in (item.rule, *item.within) if rule]
