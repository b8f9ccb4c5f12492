"""What a model writes is searched for calls of tools, whatever it writes."""

from __future__ import annotations

import json

import pytest

from pykvedge.chat.serve.tools import arguments_of, calls_in
from pykvedge.chat.serve.wire import FunctionTool, Tool

TOOLS = [Tool(type="function", function=FunctionTool(name=name)) for name in ("look", "add")]


def found(text):
    rest, calls = calls_in(text, TOOLS)
    return rest, [(call["function"]["name"], arguments_of(call)) for call in calls]


def test_calls_are_found():
    one = json.dumps({"name": "look", "arguments": {"at": "x"}})
    assert found(one) == ("", [("look", {"at": "x"})])
    assert found(f"I look. <tool_call>{one}</tool_call> Done.") == ("I look.  Done.", [("look", {"at": "x"})])
    assert found(f"```json\n[{one}]\n```") == ("", [("look", {"at": "x"})])
    assert found('{"name": "add", "parameters": {"a": 1}}') == ("", [("add", {"a": 1})])
    assert found('{"name": "look", "arguments": "{\\"at\\": 1}"}') == ("", [("look", {"at": 1})])


@pytest.mark.parametrize("name", [[], {}, None, 5, True, "other", ["look"]])
def test_a_name_that_is_none_is_text(name):
    text = json.dumps({"name": name, "arguments": {}})
    assert found(text) == (text, [])


@pytest.mark.parametrize("text", ["not JSON", "[1, 2]", "5", "null", "{", "[" * 5000])
def test_arguments_that_are_no_object_are_handed_over_as_text(text):
    rest, [(name, arguments)] = found(json.dumps({"name": "look", "arguments": text}))
    assert (rest, name, arguments) == ("", "look", {"text": text})
