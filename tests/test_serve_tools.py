"""`kvedge serve`: tool calls and reasoning in each of its wire formats, whole and as streams.

The model has random weights: a grammar makes it write what a model of the dialect would write.
"""

import json

import pytest
from dialects import HERMES, MISTRAL, WORKER, gbnf, model
from server import serving

ASKED = [{"role": "user", "content": "Look at x, please."}]
FIRST, SECOND = {"at": 'x "y"', "n": 5}, {"at": "z"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": "It looks.", "parameters": SCHEMA}}
         for name in ("look", "see")]  # fmt: skip


def call(name, arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


ANSWER = f"<think>\nhm < hm\n</think>\n\nI look.\n{call('look', FIRST)}\n{call('see', SECOND)}"


@pytest.fixture(scope="module")
def hermes(environment, tmp_path_factory):
    path = model(tmp_path_factory.mktemp("hermes"), HERMES)
    with serving(environment, path, gbnf(ANSWER), program=WORKER) as one:
        yield one


def events(server, path, body):
    """Returns the data of each event of a stream."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_completion_has_reasoning_text_and_calls(hermes):
    answer = hermes.chat(ASKED, tools=TOOLS, max_tokens=1000).json()
    assert 5 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 12  # letters are tokens
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"].strip(), message["content"]) == ("hm < hm", "I look.")
    made = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    assert made == [("look", FIRST), ("see", SECOND)]
    assert len({one["id"] for one in message["tool_calls"]}) == 2


def test_a_stream_tells_all_of_it_as_it_comes(hermes):
    deltas = [chunk["choices"][0] for chunk in events(hermes, "/v1/chat/completions",
              {"messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 1000})]  # fmt: skip
    kinds = [next(iter(one["delta"].keys() - {"role"}), "") for one in deltas if one["delta"]]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert order == ["content", "reasoning_content", "content", "tool_calls"]  # the first has no text
    assert deltas[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("begun", "kind"), [
    ("<think>\n", "reasoning_content"), ("I look", "content"), (call("look", {"at": ""})[:-16], "tool_calls"),
])  # fmt: skip
def test_a_stream_does_not_wait_for_the_end(hermes, begun, kind):
    endless = f"{gbnf(begun)} [a-c]+"
    body = {"messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 1500, "grammar": endless, "stream": True}
    with hermes.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        choices = (json.loads(line)["choices"][0] for line in lines)
        first = next(one for one in choices if kind in one["delta"] and "role" not in one["delta"])
        assert first["finish_reason"] is None and next(choices)["finish_reason"] is None  # the stream goes on


@pytest.mark.parametrize("name", [{}, {"name": "bot"}])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_call_that_was_begun_is_gone_on_with(hermes, in_parts, name):
    begun, rest = call("look", FIRST)[:40], call("look", FIRST)[40:]
    content = [{"type": "text", "text": begun}] if in_parts else begun
    said = [*ASKED, {"role": "assistant", "content": content, **name}]
    answer = hermes.chat(said, tools=TOOLS, grammar=gbnf(rest), max_tokens=1000)
    assert answer.status_code == 200, answer.text
    (made,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == FIRST


def test_a_call_without_arguments_may_have_none(hermes):
    """Other servers write an empty text for no arguments."""
    def said(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "1", "content": ""}
        return [*ASKED, {"role": "assistant", "tool_calls": [call]}, result]

    prompts = [hermes.client.post("/apply-template", json={"messages": said(text)}).json() for text in ("{}", "")]
    assert prompts[0] == prompts[1] and '"arguments": {}' in prompts[0]["prompt"]


def test_openais_client_reads_a_stream(hermes):
    import openai

    client = openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0)
    with client.chat.completions.stream(model="m", messages=ASKED, tools=TOOLS, max_tokens=1000) as stream:
        done = stream.get_final_completion().choices[0]
    made = [(one.function.name, json.loads(one.function.arguments)) for one in done.message.tool_calls]
    assert (done.finish_reason, done.message.content.strip(), made) == (
        "tool_calls", "I look.", [("look", FIRST), ("see", SECOND)])  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_client_reads_messages(hermes, streams):
    import anthropic

    client = anthropic.Anthropic(base_url=hermes.url, api_key="none", max_retries=0)
    tools = [{"name": one["function"]["name"], "input_schema": SCHEMA} for one in TOOLS]
    asked = {"model": "m", "max_tokens": 1000, "messages": ASKED, "tools": tools}
    if streams:
        with client.messages.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_message()
        assert {"thinking", "text", "input_json"} <= kinds
    else:
        message = client.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, *calls = message.content
    assert (thought.thinking.strip(), text.text.strip()) == ("hm < hm", "I look.")
    assert [(one.name, one.input) for one in calls] == [("look", FIRST), ("see", SECOND)]
    assert message.stop_reason == "tool_use"
    # the conversation goes on with the results
    results = [{"type": "tool_result", "tool_use_id": one.id, "content": "5"} for one in calls]
    again = [*ASKED, {"role": "assistant", "content": [block.model_dump() for block in message.content]},
             {"role": "user", "content": results}]  # fmt: skip
    counted = [client.messages.count_tokens(model="m", messages=messages, tools=tools).input_tokens
               for messages in (ASKED, again)]  # fmt: skip
    assert counted[1] > counted[0] + len(ANSWER) // 4
    assert client.messages.create(**{**asked, "messages": again}).stop_reason == "tool_use"


@pytest.mark.parametrize("streams", [False, True])
def test_openais_client_reads_responses(hermes, streams):
    import openai

    client = openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "strict": False, **one["function"]} for one in TOOLS]
    asked = {"model": "m", "input": ASKED, "tools": tools, "max_output_tokens": 1000}
    if streams:
        with client.responses.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            response = stream.get_final_response()
        assert {"response.reasoning_text.delta", "response.output_text.delta",
                "response.function_call_arguments.delta"} <= kinds  # fmt: skip
    else:
        response = client.responses.create(**asked)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, _, *calls = response.output
    assert (thought.content[0].text.strip(), response.output_text.strip()) == ("hm < hm", "I look.")
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [("look", FIRST), ("see", SECOND)]
    results = [{"type": "function_call_output", "call_id": one.call_id, "output": "5"} for one in calls]
    said = [item.model_dump(exclude_none=True) for item in response.output]
    again = client.responses.create(**{**asked, "input": [*ASKED, *said, *results]})
    assert 5 < response.usage.output_tokens_details.reasoning_tokens < 12
    assert again.usage.input_tokens > response.usage.input_tokens + len(ANSWER) // 4


def test_without_tools_reasoning_is_apart_all_the_same(hermes):
    answer = hermes.chat(ASKED, max_tokens=1000).json()["choices"][0]["message"]
    assert answer["reasoning_content"].strip() == "hm < hm"
    assert answer["content"] == ANSWER.partition("</think>\n\n")[2] and "tool_calls" not in answer
    plain = hermes.chat(ASKED, max_tokens=1000, reasoning_format="none").json()["choices"][0]["message"]
    assert plain["content"] == ANSWER and "reasoning_content" not in plain


def test_logprobs_come_with_what_they_are_of(hermes):
    asked = {"messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 1000, "logprobs": True}
    told = [chunk["choices"][0]["logprobs"] for chunk in events(hermes, "/v1/chat/completions", asked)]
    whole = hermes.chat(ASKED, tools=TOOLS, max_tokens=1000, logprobs=True).json()["choices"][0]["logprobs"]
    assert [one["token"] for part in told if part for one in part["content"]] == [
        one["token"] for one in whole["content"]]  # fmt: skip


# ---------------------------------------------------------------------------------------------------

MARKS = ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]")  # fmt: skip
CALLS = 640 - len(MARKS)  # the number of the first special token
EXACT = {"type": "object", "properties": {"at": {"const": "x"}}, "required": ["at"], "additionalProperties": False}
ONE = [{"type": "function", "function": {"name": name, "parameters": EXACT}} for name in ("look", "see")]


@pytest.fixture(scope="module")
def mistral(environment, tmp_path_factory):
    """A server for Mistral's dialect. A random model needs a bias to write the special token before calls."""
    path = model(tmp_path_factory.mktemp("mistral"), MISTRAL, MARKS)
    with serving(environment, path, "", program=WORKER) as one:
        yield one


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "see"}}])
def test_a_call_that_begins_with_a_special_token_follows_its_schema(mistral, choice):
    answer = mistral.chat(ASKED, tools=ONE, tool_choice=choice, parallel_tool_calls=False, max_tokens=900,
                          logit_bias={str(CALLS): 100}).json()  # fmt: skip
    (chosen,) = answer["choices"]
    (made,) = chosen["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"at": "x"}
    assert made["function"]["name"] in (("see",) if isinstance(choice, dict) else ("look", "see"))
    assert chosen["message"]["content"] is None and chosen["finish_reason"] == "tool_calls"


def test_its_answers_without_calls_are_text(mistral):
    with_tools = mistral.text(ASKED, tools=ONE, logit_bias={str(CALLS): -100})
    assert with_tools and "[TOOL_CALLS]" not in with_tools
    assert mistral.text(ASKED, tools=ONE, tool_choice="none") == mistral.text(ASKED)


def test_fields_that_do_not_fit_are_refused(mistral):
    for fields in ({"reasoning_format": "other"}, {"parallel_tool_calls": "yes"},
                   {"chat_template_kwargs": {"tools": []}},
                   {"tools": ONE, "tool_choice": "required", "grammar": gbnf("a")},
                   {"tools": ONE, "tool_choice": {"type": "function", "function": {"name": "other"}}}):  # fmt: skip
        assert mistral.chat(ASKED, **fields).status_code == 400, fields
