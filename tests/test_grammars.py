"""Answers of a model with random weights have the given form, and llama.cpp's sampler accepts them."""

import ctypes
import json
import math
import random
import re

import numpy as np
import pytest

import pykvedge
from pykvedge import GrammarError, Sampling, UsageError
from pykvedge.runtime.grammar import Grammar

QUESTION = "What is there to see, and what is it good for?"
# (grammar, the same language as a regular expression)
PAIRS = [
    ('root ::= "yes" | "no"', r"yes|no"),
    ('root ::= [a-c]{2,4} "-" [0-9]{1,3} "."', r"[a-c]{2,4}-[0-9]{1,3}\."),
    ('root ::= " " word " " word\nword ::= [A-Z] [a-z]{0,5}', r" [A-Z][a-z]{0,5} [A-Z][a-z]{0,5}"),
    ('root ::= "\u00e9" [\u4e00-\u9fff]{2} "\U0001f999"', "\u00e9[\u4e00-\u9fff]{2}\U0001f999"),
    ('root ::= ("<s>" | "</s>") [^<>]{3}', r"</?s>[^<>]{3}"),
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "tall": {"type": "boolean"},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "car": {"oneOf": [{"type": "null"}, {"$ref": "#/definitions/car"}]},
    },
    "required": ["name", "tall", "colours", "car"],
    "definitions": {
        "car": {"type": "object", "properties": {"wheels": {"enum": [3, 4]}}, "required": ["wheels"]},
    },
}


def valid_person(value):
    return (
        set(value) == {"name", "tall", "colours", "car"}
        and isinstance(value["name"], str) and 1 <= len(value["name"]) <= 8
        and isinstance(value["tall"], bool)
        and 1 <= len(value["colours"]) <= 3 and set(value["colours"]) <= {"red", "green", "blue"}
        and value["car"] in (None, {"wheels": 3}, {"wheels": 4})
    )  # fmt: skip


SCHEMAS = [
    ({"enum": ["red", 3, None, {"a": [1]}]}, lambda v: v in ("red", 3, None, {"a": [1]})),
    ({"type": "boolean"}, lambda v: isinstance(v, bool)),
    ({"const": 'a "quoted" \\ text\n'}, lambda v: v == 'a "quoted" \\ text\n'),
    ({"type": "array", "items": {"type": "boolean"}, "maxItems": 4}, lambda v: len(v) <= 4),
    ({"type": "string", "pattern": "^[0-9]{3}-[a-f]+x$"}, lambda v: re.fullmatch("[0-9]{3}-[a-f]+x", v)),
    # invalid UTF-8 becomes one character for each byte
    ({"type": "string", "pattern": "^.[^a-z]{20}(x|y)$"}, lambda v: v[-1] in "xy" and not re.search("[a-z]", v[1:-1])),
    ({"type": "string", "pattern": r"^(a\(|[b-d]\|)$"}, lambda v: v in ("a(", "b|", "c|", "d|")),
    ({"type": "string", "minLength": 60, "maxLength": 60}, lambda v: len(v) == 60),
    ({"properties": {'a "name"\\': {"const": "\u00e9\t\U0001f999"}}, "required": ['a "name"\\']},
     lambda v: v == {'a "name"\\': "\u00e9\t\U0001f999"}),
    ({"type": "string", "format": "date"}, lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v)),
    ({"type": ["integer", "null"]}, lambda v: v is None or isinstance(v, int)),
    ({"type": "number"}, lambda v: isinstance(v, int | float)),
    (PERSON, valid_person),
]


@pytest.fixture(scope="module", params=["llama", "qwen2vl"])
def session(request, tiny):
    with tiny(request.param).session() as opened:
        yield opened


@pytest.fixture
def fresh(session):
    session.clear()
    return session


@pytest.mark.parametrize("settings", [{}, {"temp": 2.0, "top_k": 0, "top_p": 1.0, "seed": 6}])
@pytest.mark.parametrize(("grammar", "pattern"), PAIRS)
def test_an_answer_follows_a_grammar(fresh, grammar, pattern, settings):
    answer = fresh.ask(QUESTION, sampling=Sampling(**settings, grammar=grammar))
    pieces = list(answer)
    assert re.fullmatch(pattern, "".join(pieces)) and answer.report.finish == "end"
    assert fresh.messages[-1].text == "".join(pieces) and fresh.in_cache
    assert fresh.ask("And then?", sampling=Sampling(max_tokens=3)).read()


@pytest.mark.parametrize("settings", [{}, {"temp": 2.0, "top_k": 0, "top_p": 1.0, "seed": 6}])
@pytest.mark.parametrize(("schema", "valid"), SCHEMAS)
def test_an_answer_is_json_by_a_schema(fresh, schema, valid, settings):
    likely = {"logit_bias": {"x": 8.0}} if "pattern" in schema else {}  # this repetition does not end by itself
    answer = fresh.ask(QUESTION, sampling=Sampling(**settings, **likely, json_schema=schema, max_tokens=600))
    text = answer.read()
    # a model with random weights may never end a number
    assert valid(json.loads(text)) and answer.report.finish == ("length" if len(text) > 500 else "end")


def test_the_stock_sampler_chooses_the_same_tokens(fresh):
    grammar = 'root ::= ([a-z]{2,6} " "){5} ("the end" | "over")'
    model = fresh.model
    llama = model.llama
    stock = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    llama.llama_sampler_chain_add(stock, llama.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root"))
    llama.llama_sampler_chain_add(stock, llama.llama_sampler_init_greedy())
    answer = fresh.ask(QUESTION, sampling=Sampling(grammar=grammar, logprobs=0))
    answer.read()
    got = [token.id for token in answer.tokens]
    fresh.clear()
    replay = fresh.ask(QUESTION)
    expected = []
    while not model.is_end(token := llama.llama_sampler_sample(stock, fresh.engine.context.handle, -1)):
        expected.append(token)
        fresh.engine.extend(token)
    llama.llama_sampler_free(stock)
    replay.close()
    assert got == expected and len(got) > 5


SAME = [
    'root ::= word "ing"\nword ::= [a-z]+',
    'root ::= ("a" | "ab") "bc" | [^a] .',
    'root ::= a\na ::= . b\nb ::= . a | ""',
    'root ::= "<" u "</t>"\nu ::= | "<" u-1 | [^<] u\nu-1 ::= | "<" u-1 | "/" u-2 | [^</] u\n'
    'u-2 ::= | "<" u-1 | "t" u-3 | [^<t] u\nu-3 ::= | "<" u-1 | [^<>] u',
    'root ::= (expr "=" ws term "\\n")+\nexpr ::= term ([-+*/] term)*\n'
    'term ::= ident | num | "(" ws expr ")" ws\nident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*',
    'root ::= object\nvalue ::= object | array | string | ("true" | "null") ws\n'
    'object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws\n'
    'array ::= "[" ws (value ("," ws value)*)? "]" ws\n'
    'string ::= "\\"" ([^"\\\\\\x7F\\x00-\\x1F] | "\\\\" (["\\\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\\"" ws\n'
    'ws ::= ([ \\t\\n] ws)?',
    'root ::= "\u00e9"{2,3} [\u4e00-\u9fff\\-\\]a-c-]? "\\x41"+ ("x" | )',
]


def is_text(piece):
    try:
        return piece.decode() not in ("", "\0")
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("grammar", SAME)
def test_the_same_tokens_may_come_as_in_llama_cpp(session, grammar):
    model, rng = session.model, random.Random(5)
    llama, n = model.llama, model.n_vocab
    ends = np.array([model.is_end(token) for token in range(n)])
    ours = Grammar(Sampling(grammar=grammar), model)
    stock = llama.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root")
    data = (llama.llama_token_data * n)()
    view = np.frombuffer(data, [("id", "i4"), ("logit", "f4"), ("p", "f4")])
    whole = np.array([is_text(model.piece(token)) for token in range(n)])  # llama.cpp accepts invalid UTF-8
    for _ in range(60):
        view["id"], view["logit"] = np.arange(n), 0
        llama.llama_sampler_apply(stock, ctypes.byref(llama.llama_token_data_array(data, n, -1, False)))
        expected = np.isfinite(view["logit"]) & (whole | ends)
        possible = ours.take(int(np.flatnonzero(~model.table().allowed)[0])) & (whole | ends)
        assert not [(t, model.piece(t), bool(possible[t])) for t in np.flatnonzero(possible != expected).tolist()]
        if not possible[~ends].any():
            break
        token = int(rng.choice(np.flatnonzero(possible & ~ends)))
        assert ours.take(token) is None
        llama.llama_sampler_accept(stock, token)
    llama.llama_sampler_free(stock)


def test_where_a_grammar_has_no_way_on(fresh):
    model = fresh.model
    begin_a = [t for t in range(model.n_vocab) if model.piece(t).startswith(b"a")]
    sampling = Sampling(grammar='root ::= "xyz" "a" "b"', logit_bias=dict.fromkeys(begin_a, -math.inf))
    answer = fresh.ask(QUESTION, sampling=sampling)
    with pytest.raises(GrammarError, match="the answer cannot continue: no token of the model fits") as error:
        answer.read()
    assert "\n" not in str(error.value) and error.value.exit_code == 2
    assert fresh.messages[-1].text == "xyz" == answer.report.text and fresh.in_cache
    assert fresh.ask("And then?", sampling=Sampling(max_tokens=3)).read()


def test_an_answer_that_is_whole_ends_though_a_bias_forbids_it(fresh):
    ends = [t for t in range(fresh.model.n_vocab) if fresh.model.is_end(t)]
    sampling = Sampling(grammar='root ::= "ab"', logit_bias=dict.fromkeys(ends, -math.inf))
    answer = fresh.ask(QUESTION, sampling=sampling)
    assert answer.read() == "ab" and answer.report.finish == "end"


def test_all_else_goes_along_with_a_grammar(fresh):
    letters = 'root ::= [a-e]{40} "!"'
    plain = fresh.ask(QUESTION, sampling=Sampling(grammar=letters, max_tokens=60)).read()
    fresh.clear()
    answer = fresh.ask(QUESTION, sampling=Sampling(grammar=letters, stop=plain[10:13], max_tokens=60))
    assert answer.read() == plain[: plain.find(plain[10:13])] and answer.report.finish == "stop"
    fresh.clear()
    answer = fresh.ask(QUESTION, sampling=Sampling(grammar=letters, max_tokens=3))
    assert plain.startswith(answer.read()) and answer.report.finish == "length"
    fresh.clear()
    penalised = Sampling(grammar=letters, presence_penalty=20.0, logit_bias={"a": 5.0}, max_tokens=60)
    assert fresh.ask(QUESTION, sampling=penalised).read() != plain


def test_a_whole_answer_matches_a_regular_expression(fresh):
    for pattern in (r"(yes|no)/\d{3}", r"[^\n]{2,5}\n", "\u00e9+x"):
        answer = fresh.ask(QUESTION, sampling=Sampling(regex=pattern, temp=2.0, top_k=0, top_p=1.0, seed=3))
        text = answer.read()
        assert re.fullmatch(pattern, text) or (answer.report.finish == "length" and pattern.startswith("\u00e9"))
        fresh.clear()
    wrong = {"(?=a)b": "look-around.* not supported", "(": "unclosed group", "x\\": "ends in a backslash"}
    wrong["[z-a]" + "b" * 300] = "range"
    for pattern, why in wrong.items():
        with pytest.raises(GrammarError, match=f"the regular expression .*{why}") as error:
            fresh.ask(QUESTION, sampling=Sampling(regex=pattern))
        assert "\n" not in str(error.value)
    with pytest.raises(GrammarError, match="the JSON schema cannot be used: regex: unclosed group"):
        fresh.ask(QUESTION, sampling=Sampling(json_schema={"type": "string", "pattern": "("}))


def test_a_vocabulary_is_prepared_once(tiny):
    with (
        pykvedge.load(tiny("llama").model, threads=1) as model,
        pykvedge.Session(model) as one,
        pykvedge.Session(model) as other,
    ):
        assert one.model.table() is other.model.table()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"grammar": 5}, "text or a file"),
        ({"grammar": b"root"}, "text or a file"),
        ({"grammar": "nowhere.gbnf"}, "nowhere.gbnf cannot be read"),
        ({"grammar": ""}, "the grammar is empty; give the grammar as text"),
        ({"grammar": "x" * 10_000_000}, "cannot be read"),
        ({"grammar": 'root ::= "a\0"'}, "contains a zero byte"),
        ({"grammar": 'root ::= "\ud800"'}, "contains invalid characters"),
        ({"grammar": "a\0b"}, "cannot be read"),
        ({"grammar": 'root ::= "' + "x" * 10_000_000 + '"'}, "larger than 1 MiB"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "exclude each other"),
        ({"json_schema": 5}, "text or a file"),
        ({"json_schema": []}, "text or a file"),
        ({"json_schema": {"enum": {1, 2}}}, "not JSON"),
        ({"json_schema": "{'enum': 1}"}, "not JSON"),
        ({"json_schema": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"json_schema": '{"a":' * 100_000}, "nested too deeply|not JSON"),
        ({"json_schema": {"const": "x" * 10_000_000}}, "larger than 1 MiB"),
    ],
)
def test_forms_that_are_none(settings, why):
    with pytest.raises(GrammarError, match=why) as error:
        Sampling(**settings)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400 and isinstance(error.value, UsageError)


def test_forms_come_from_files(tmp_path):
    file = tmp_path / "yes.gbnf"
    file.write_text(PAIRS[0][0])
    assert Sampling(grammar=file) == Sampling(grammar=str(file)) == Sampling(grammar=PAIRS[0][0])
    file.write_text(json.dumps(PERSON))
    assert Sampling(json_schema=file) == Sampling(json_schema=str(file)) == Sampling(json_schema=PERSON)
    for data, why in ((b"\xff\xfe", "not UTF-8 text"), (b"hello", "no rule"), (b"x" * 2_000_000, "no rule|larger")):
        file.write_bytes(data)
        with pytest.raises(GrammarError, match=why):
            Sampling(grammar=file)
    for data, why in ((b"[1]", "must be an object"), (b"{", "not JSON"), (b"", "not JSON")):
        file.write_bytes(data)
        with pytest.raises(GrammarError, match=why):
            Sampling(json_schema=file)


def test_the_options(kvedge, tiny, tmp_path):
    base = ["chat", *tiny("llama").arguments(), "--quiet"]
    file = tmp_path / "form"
    file.write_text(PAIRS[1][0])
    for given in (PAIRS[1][0], file):
        done = kvedge(*base, "--grammar", given, QUESTION)
        assert done.code == 0 and done.err == "" and re.fullmatch(PAIRS[1][1], done.out.rstrip("\n"))
    file.write_text(json.dumps(PERSON))
    for given in (json.dumps(PERSON), file):
        done = kvedge(*base, "--json-schema", given, QUESTION)
        assert done.code == 0 and done.err == "" and valid_person(json.loads(done.out))
    kvedge(*base, "--grammar", "nowhere", QUESTION).failed(2, "nowhere cannot be read")
    kvedge(*base, "--grammar", "", QUESTION).failed(2, "grammar is empty")
    kvedge(*base, "--grammar", 'root ::= "a', QUESTION).failed(2, "grammar cannot be used", "grammar ends too early")
    kvedge(*base, "--grammar", "root ::= other", QUESTION).failed(2, "Undefined rule identifier 'other'")
    kvedge(*base, "--json-schema", '{"type": "number of legs"}', QUESTION).failed(2, "JSON schema cannot be used")
    kvedge(*base, "--json-schema", "{}", "--grammar", PAIRS[0][0], QUESTION).failed(2, "exclude each other")
