"""Grammars and schemas that would end the process, or never end: each is one line, soon, and the session goes on."""

from __future__ import annotations

import json

import pytest

from pykvedge import GrammarError, Sampling
from pykvedge.runtime import grammar


def nested(n):
    inner: dict = {"type": "boolean"}
    for _ in range(n):
        inner = {"type": "array", "items": inner}
    return inner


HOSTILE = {
    "brackets": {"grammar": "root ::= " + "(" * 500_000 + '"a"' + ")" * 500_000},
    "open brackets": {"grammar": "root ::= " + "(" * 1_000_000},
    "left recursion": {"grammar": 'root ::= root "a" | "b"'},
    "left recursion behind a rule": {"grammar": 'root ::= a "x"\na ::= b "y"\nb ::= root "z"'},
    "many repetitions": {"grammar": 'root ::= "a"{1000000}'},
    "repetitions of repetitions": {"grammar": 'root ::= (("a"{1000}){1000}){1000}'},
    "a number that is none": {"grammar": 'root ::= "a"{99999999999999999999999999}'},
    "a long chain of rules": {"grammar": "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(60_000))])
                              + '\nr60000 ::= "a"'},
    "every way at once": {"grammar": "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(60))])
                          + '\nr60 ::= "a"'},
    "no rule of that name": {"grammar": "root ::= a b c"},
    "an unknown token": {"grammar": "root ::= <[99999999999999999999]>"},
    "unended class": {"grammar": "root ::= [a-"},
    "unended escape": {"grammar": r'root ::= "\x'},
    "nested schema": {"json_schema": nested(300)},
    "nested as text": {"json_schema": '{"items":' * 30_000 + "{}" + "}" * 30_000},
    "many properties": {"json_schema": {"properties": {f"p{i}": {"type": "null"} for i in range(3000)}}},
    "many items": {"json_schema": {"type": "array", "items": {"type": "null"}, "minItems": 1_000_000}},
    "long texts": {"json_schema": {"type": "string", "minLength": 10**9}},
    "a pattern": {"json_schema": {"type": "string", "pattern": "^" + "(a" * 5000 + ")" * 5000 + "$"}},
    "a pattern that is none": {"json_schema": {"type": "string", "pattern": "^(a$"}},
    "a pattern of nothing": {"json_schema": {"type": "string", "pattern": "^*$"}},
    "a pattern with quotes": {"json_schema": {"type": "string", "pattern": '^"x"$'}},
    "a pattern of all characters": {"json_schema": {"type": "string", "pattern": "^[ -~]{3}$"}},
    "a pattern of digits": {"json_schema": {"type": "string", "pattern": r"^\d$"}},
    "a character that is none": {"json_schema": r'{"const": "\ud800"}'},
    "an address": {"json_schema": {"$ref": "https://localhost:9/schema.json"}},
    "a reference to nothing": {"json_schema": {"$ref": "#/definitions/nothing"}},
    "a type that is none": {"json_schema": {"type": 5}},
    "properties that are none": {"json_schema": {"properties": 5}},
    "alternatives that are none": {"json_schema": {"anyOf": [5]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def session(tiny):
    with tiny("llama").session() as opened:
        yield opened


@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_form_is_one_line(session, monkeypatch, capfd, form):
    """Or it is followed as far as max_tokens go: some builds manage what others have no stack for."""
    monkeypatch.setattr(grammar, "PATIENCE", 3.0)
    session.clear()
    try:
        answer = session.ask("Hello", sampling=Sampling(**form, max_tokens=4))
        answer.read()
        assert answer.report.tokens.generated <= 4
    except GrammarError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
    assert capfd.readouterr() == ("", "")
    assert session.ask("Hello", sampling=Sampling(grammar='root ::= "yes"')).read() == "yes"


@pytest.mark.parametrize(
    "name", ["brackets", "left recursion", "many repetitions", "every way at once", "an address", "a type that is none",
             "a pattern with quotes", "a pattern of all characters", "a pattern of digits", "a character that is none"],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_before_the_prompt_is_read(session, monkeypatch, name):
    monkeypatch.setattr(grammar, "PATIENCE", 3.0)
    session.clear()
    with pytest.raises(GrammarError, match=r"cannot be (used|followed)"):
        session.ask("Hello", sampling=Sampling(**HOSTILE[name]))
    assert not session.messages


def test_a_grammar_with_more_ways_than_memory_is_ended(session, monkeypatch):
    """Each letter doubles what it may go on with."""
    monkeypatch.setattr(grammar, "PATIENCE", 3.0)
    session.clear()
    ways = 'root ::= s\ns ::= "a" s "b" | "a" s "c" | "a" s "d" | "e"'
    forbidden = {"e": -1e6}
    answer = session.ask("Hello", sampling=Sampling(grammar=ways, logit_bias=forbidden, max_tokens=400))
    with pytest.raises(GrammarError, match="cannot be followed: it takes") as error:
        answer.read()
    assert "\n" not in str(error.value)
    assert set(session.messages[-1].text) == {"a"} and session.in_cache
    assert session.ask("Hello", sampling=Sampling(max_tokens=3)).read()


def test_the_program_says_so(kvedge, tiny, tmp_path):
    base = ["chat", *tiny("llama").arguments()]
    file = tmp_path / "g.gbnf"
    file.write_text(HOSTILE["brackets"]["grammar"])
    kvedge(*base, "--grammar", file, "Hello").failed(2, "the grammar cannot be followed")
    file.write_text(json.dumps(HOSTILE["an address"]["json_schema"]))
    kvedge(*base, "--json-schema", file, "Hello").failed(2, "the JSON schema cannot be used")
    kvedge(*base, "--grammar", "/dev/zero", "Hello").failed(2, "grammar")
