"""Grammars and schemas that would need too much time or memory fail soon, with one line. The session stays usable."""

import json

import pytest

from pykvedge import GrammarError, Sampling


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
    "a chain of options": {"grammar": "root ::= " + '"a"? ' * 3000},
    "all that begins with itself": {"grammar": 'root ::= s\ns ::= s s s | [a-z] | ""'},
    "repetitions of anything": {"grammar": "root ::= (((.{0,1000}){0,1000}){0,1000}){0,1000}"},
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
    "a pattern of options": {"json_schema": {"type": "string", "pattern": "^" + "a?" * 1500 + "b$"}},
    "patterns in common": {"json_schema": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(60)]}},
    "named by patterns": {"json_schema": {"patternProperties": {f"^p{i}x.*": {"type": "null"} for i in range(300)}}},
    "a large prime": {"json_schema": {"type": "integer", "multipleOf": 999983}},
    "what it fails at": {"json_schema": {"minItems": "\u00e9" * 200}},
    "a long regular expression": {"regex": "((a{0,100}){0,100}){0,100}"},
    "a regular expression that is none": {"regex": "(a"},
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


@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_form_is_one_line(session, capfd, form):
    """Some builds can follow the grammar, up to max_tokens, where others have too little stack."""
    try:
        answer = session.ask("Hello", sampling=Sampling(**form, max_tokens=4))
        answer.read()
        assert answer.report.tokens.generated <= 4
    except GrammarError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
    assert capfd.readouterr() == ("", "")
    assert session.ask("Hello", sampling=Sampling(grammar='root ::= "yes"')).read() == "yes"


@pytest.mark.parametrize(
    "name", ["brackets", "left recursion behind a rule", "many repetitions", "no rule of that name", "an address",
             "a type that is none", "a reference to nothing", "a character that is none", "a pattern that is none"],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_before_the_prompt_is_read(session, name):
    with pytest.raises(GrammarError, match=r"cannot be used|the answer cannot continue"):
        session.ask("Hello", sampling=Sampling(**HOSTILE[name]))
    assert not session.messages


def test_the_program_says_so(kvedge, tiny, tmp_path):
    base = ["chat", *tiny("llama").arguments()]
    file = tmp_path / "g.gbnf"
    file.write_text(HOSTILE["brackets"]["grammar"])
    kvedge(*base, "--grammar", file, "Hello").failed(2, "the grammar cannot be used")
    file.write_text(json.dumps(HOSTILE["an address"]["json_schema"]))
    kvedge(*base, "--json-schema", file, "Hello").failed(2, "the JSON schema cannot be used")
    kvedge(*base, "--grammar", "/dev/zero", "Hello").failed(2, "grammar")
