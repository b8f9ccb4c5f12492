"""Any text of a model is searched for tool calls when the template does not support tools."""

import json

import pytest

from pykvedge.serve.reading import JsonCallReading
from pykvedge.serve.tools import arguments_of, forced_schema
from pykvedge.serve.wire import Tool

ONE = json.dumps({"name": "look", "arguments": {"at": "x"}})
NAMES = {"look", "add"}


def found(text):
    answer = JsonCallReading(NAMES)
    answer.finish(text)
    return answer.parsed.text, [(call.name, arguments_of(call)) for call in answer.parsed.calls]


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (ONE, "", [("look", {"at": "x"})]),
        (f"I look. <tool_call>{ONE}</tool_call> Done.", "I look.  Done.", [("look", {"at": "x"})]),
        (f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}", "\n", [("look", {"at": "x"})] * 2),
        (f"```json\n[{ONE}]\n```", "", [("look", {"at": "x"})]),
        (f" [{ONE}, {ONE}] ", "", [("look", {"at": "x"})] * 2),
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ('{"name": "look", "arguments": "{\\"at\\": 1}"}', "", [("look", {"at": 1})]),
    ],
)
def test_calls_are_found(text, rest, calls):
    assert found(text) == (rest, calls)


@pytest.mark.parametrize(
    "text",
    ["a < b", "ends with <tool", "``", "```", "```json", "```python\nprint([1])\n```\nand more", "```json\n{}\n```",
     "<tool_call>none</tool_call> it is", "<tool_call>", "{", "[1, 2] are numbers", '{"name": "other"}', " {} ",
     "```[1", f"``` {ONE} and no end", "<tool_call><tool_call>"],
)  # fmt: skip
def test_other_text_stays_as_it_is(text):
    assert found(text) == (text, [])


@pytest.mark.parametrize("text", [f"a <b> ```c``` <tool_call>{ONE}</tool_call>d", f"```json\n{ONE}```", ONE, "[1] <to"])
def test_text_comes_at_once_and_calls_when_they_are_whole(text):
    answer = JsonCallReading(NAMES)
    told, calls = "", []
    for i, piece in enumerate(text):
        for delta in answer.feed(piece):
            told += delta.text
            calls += [delta] if delta.call >= 0 else []
        if text[0] not in "{[":  # only a possible call waits
            begun = text[: i + 1]
            assert begun.startswith(told) or calls
            rest = begun[len(told) :]
            assert calls or not rest or rest[0] in "<`"
    for delta in answer.finish():
        told += delta.text
        calls += [delta] if delta.call >= 0 else []
    assert (told, [(one.name, json.loads(one.arguments)) for one in calls]) == found(text)
    assert len({one.id for one in calls}) == len(calls)


@pytest.mark.parametrize("name", [[], {}, None, 5, True, "other", ["look"]])
def test_a_name_that_is_none_is_text(name):
    text = json.dumps({"name": name, "arguments": {}})
    assert found(text) == (text, [])


@pytest.mark.parametrize("text", ["not JSON", "[1, 2]", "5", "null", "{", "[" * 5000])
def test_arguments_that_are_no_object_are_handed_over_as_text(text):
    rest, [(name, arguments)] = found(json.dumps({"name": "look", "arguments": text}))
    assert (rest, name, arguments) == ("", "look", {"text": text})


@pytest.mark.parametrize("n", [1, 2])
def test_parameters_keep_what_they_refer_to(n):
    import jsonschema

    following = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
    node = {"type": "object", "properties": {"n": {"type": "integer"}, "next": following}, "required": ["n", "next"]}
    node["properties"]["default"] = {"$ref": "#/$defs/Node"}  # the name of a property, not data
    parameters = {"$defs": {"Node": node}, "$ref": "#/$defs/Node"}
    functions = [{"name": f"f{i}", "parameters": parameters} for i in range(n)]
    tools = [Tool.model_validate({"type": "function", "function": function}) for function in functions]
    schema = jsonschema.Draft202012Validator(forced_schema(tools))
    inner = ({"n": 2, "next": last} for last in (None, 5))
    right, wrong = ({"name": "f0", "arguments": {"n": 1, "next": None, "default": one}} for one in inner)
    assert schema.is_valid(right) and not schema.is_valid(wrong)
