"""Answers are read in the dialect of a model's chat template: reasoning, text and calls, whole and in pieces."""

import functools
import json

import pytest
from dialects import CODER, HARMONY, HERMES, MISTRAL

from pykvedge import RequestError, Sampling
from pykvedge.models import sandbox
from pykvedge.models.dialect import Dialects, request_for
from pykvedge.plans.making import plan as make_plan
from pykvedge.serve.asking import Defaults, request_of
from pykvedge.serve.pictures import Sources
from pykvedge.serve.reading import Parsed
from pykvedge.serve.wire import ChatRequest, parsed

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {
        "type": "object", "properties": {"at": {"type": "string"}, "n": {}}, "required": ["at"]}}}
    for name in ("look", "add")
]  # fmt: skip
ARGUMENTS = {"at": 'a "b" <c>', "n": [1, {"x": None}]}
HERMES_CALL = f'<tool_call>\n{json.dumps({"name": "look", "arguments": ARGUMENTS})}\n</tool_call>'


class Words:
    """A vocabulary without special tokens."""

    def special_text(self, which):
        return {"bos": "<s>", "eos": "</s>"}[which]

    def marks(self, texts):
        return frozenset()


@functools.cache
def dialects_of(template):
    return Dialects(Words(), template)


def dialect(template, tools=TOOLS, choice="auto", several=True, after_tool=False, **values):
    found = dialects_of(template).of(request_for(tools, choice, several, values, "auto", after_tool))
    assert found is not None
    return found


def answers(found, text, begun=""):
    """Reads an answer whole, then by characters. Returns (reasoning, text, calls, deltas)."""
    whole, pieces = (Parsed(found, begun, clock=lambda: 0.0) for _ in range(2))
    whole.finish(text)
    deltas = [delta for character in text for delta in pieces.feed(character)] + pieces.finish()
    said = [[(call.name, call.arguments) for call in one.parsed.calls] for one in (whole, pieces)]
    assert said[0] == said[1]
    assert "".join(delta.text for delta in deltas).rstrip() == whole.parsed.text.rstrip()
    assert "".join(delta.reasoning for delta in deltas).rstrip() == whole.parsed.reasoning.rstrip()
    for i, call in enumerate(pieces.parsed.calls):
        own = [delta for delta in deltas if delta.call == i]
        assert own[0].name == call.name and own[0].id == call.id and not any(delta.name for delta in own[1:])
        assert "".join(delta.arguments for delta in own) == call.arguments
    return whole.parsed.reasoning.strip(), whole.parsed.text.strip(), [(n, json.loads(a)) for n, a in said[0]], deltas


@pytest.mark.parametrize(
    ("template", "text", "said"),
    [
        (HERMES, "Hello <there>", ("", "Hello <there>", [])),
        (HERMES, "<think>\nhm < hm\n</think>\n\nHello", ("hm < hm", "Hello", [])),
        (HERMES, f"I look.\n{HERMES_CALL}", ("", "I look.", [("look", ARGUMENTS)])),
        (HERMES, f"<think>\nhm\n</think>\n\n{HERMES_CALL}\n{HERMES_CALL}", ("hm", "", [("look", ARGUMENTS)] * 2)),
        (HERMES, "it ends with <tool_c", ("", "it ends with <tool_c", [])),
        (MISTRAL, f'[TOOL_CALLS][{json.dumps({"name": "add", "arguments": ARGUMENTS, "id": "123456789"})}]',
         ("", "", [("add", ARGUMENTS)])),
        (MISTRAL, "no call", ("", "no call", [])),
        (CODER, "I look.\n<tool_call>\n<function=look>\n<parameter=at>\na\nb\n</parameter>\n<parameter=n>\n5\n"
         "</parameter>\n</function>\n</tool_call>", ("", "I look.", [("look", {"at": "a\nb", "n": 5})])),
        (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello",
         ("hm", "Hello", [])),
        (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
         f"<|constrain|>json<|message|>{json.dumps(ARGUMENTS)}", ("hm", "", [("look", ARGUMENTS)])),
    ],
)  # fmt: skip
def test_an_answer_is_taken_apart(template, text, said):
    assert answers(dialect(template), text)[:3] == said


def test_what_is_known_is_told_at_once():
    found = dialect(HERMES)
    reading = Parsed(found, clock=lambda: 0.0)
    assert "".join(delta.reasoning for delta in reading.feed("<think>\nhm")) == "hm"
    reading.feed(" hm\n</think>\n\n")
    assert [delta.text for delta in reading.feed("I look")] == ["I look"]
    (name, *_) = reading.feed('<tool_call>\n{"name": "look", "arguments": {"at": "abc')
    assert name.name == "look"
    assert reading.parsed.calls[0].arguments.startswith('{"at": "abc')
    assert [delta.arguments for delta in reading.feed("def")] == ["def"]


def test_reading_waits_between_two_times_where_it_takes_long():
    now = iter([0.0, 1.0, 4.9, 5.1, 5.2])  # the first parse takes 1 s, the next comes 4 s later
    reading = Parsed(dialect(HERMES), clock=lambda: next(now))
    assert [[delta.text for delta in reading.feed(text)] for text in ("a", "b", "c")] == [["a"], [], ["bc"]]


@pytest.mark.parametrize("text", ["<tool_call>\nnone", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
                                  "<think>\nhm\n</think>\n\nI do: <tool_call>\n[]"])  # fmt: skip
def test_what_the_dialect_does_not_allow_is_text(text):
    reasoning, said, calls, _ = answers(dialect(HERMES), text)
    assert (reasoning, calls) == ("hm" if "hm" in text else "", [])
    assert said == text.rpartition("</think>\n\n")[2]


def test_a_call_that_turns_out_to_be_none_is_an_error():
    reading = Parsed(dialect(HERMES), clock=lambda: 0.0)
    reading.feed('<tool_call>\n{"name": "look", "arguments": {"at": "x", ')
    assert reading.parsed.calls
    with pytest.raises(RequestError) as failed:
        reading.finish("and so on")
    assert failed.value.status == 500


def test_an_answer_that_was_begun_is_read_with_what_was_there():
    found = dialect(HERMES)
    assert answers(found, " more", "Hello")[:3] == ("", "more", [])
    assert answers(found, f" you.\n{HERMES_CALL}", "I see")[1:3] == ("you.", [("look", ARGUMENTS)])


def test_deep_nesting_is_refused_and_not_a_crash():
    found = dialect(HERMES)
    head = '<tool_call>\n{"name": "look", "arguments": {"at": "x", "n": '
    assert found.read(head + "[" * 50 + "]" * 50 + "}}\n</tool_call>").calls
    for depth in (1000, 100_000):
        assert found.read(head + "[" * depth, True) is None
        assert found.read(head + '{"a":' * depth, True) is None


def test_the_form_of_a_call_is_a_grammar():
    free, forced = dialect(HERMES), dialect(HERMES, choice="required")
    assert free.lazy and free.triggers == (("word", "<tool_call>\n"),)
    assert not forced.lazy and forced.begin == "<|im_start|>assistant\n" and "root ::=" in forced.grammar
    assert dialect(HERMES, enable_thinking=False).begin.endswith("</think>\n\n")
    assert dialect(HERMES, [], "none").thinks and not dialect(CODER, [], "none").thinks


def test_a_dialect_is_found_once(monkeypatch):
    dialects, asked = Dialects(Words(), HERMES), request_for(TOOLS, "auto", True, {}, "auto", False)
    assert not dialects.knows(asked)
    first = dialects.of(asked)
    assert dialects.knows(asked)
    monkeypatch.setattr(sandbox.Sandbox, "describe", None)
    assert dialects.of(dict(asked)) is first


@pytest.mark.parametrize("template", ["{{ messages[0].role }", "{{ raise_exception('no') }}",
                                      "{% for i in range(10**9) %}{{ 'a' * 1000 }}{% endfor %}"])  # fmt: skip
def test_a_template_without_a_dialect_has_none(template, monkeypatch):
    monkeypatch.setattr(sandbox, "PATIENCE", 2.0)
    assert Dialects(Words(), template).of(request_for(TOOLS, "auto", True, {}, "auto", False)) is None


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
    ],
)
def test_a_template_with_a_switch_is_told_whether_to_reason(fields, thinks):
    defaults = Defaults(make_plan("full"), Sampling(), Sources(), dialects=dialects_of(HERMES))
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    request = request_of(parsed(ChatRequest, json.dumps(body).encode()), defaults)
    assert request.values["enable_thinking"] is thinks
    assert ("tools" in request.values) == ("tools" in fields)
    # an answer in the client's form is not parsed further
    assert (request.dialect is None) == ("response_format" in fields)
    assert request.sampling.constrained == (len(fields.keys() & {"tools", "response_format"}) > 0)
