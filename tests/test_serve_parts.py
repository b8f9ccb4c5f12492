"""`kvedge serve`: pictures and other parts of messages are read, or refused by name, wherever clients put them."""

import pytest
from server import SCENES, asks, cached, check_refused, data_url, picture, source_of

import pykvedge
from pykvedge.errors import BudgetError, UsageError
from pykvedge.plans.making import another
from pykvedge.serve.asking import plan_of
from pykvedge.serve.wire import ChatRequest, Compression

ASKED = [{"role": "user", "content": "What is the code?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SCENE, OTHER = SCENES[0], SCENES[1]
SERVED = ("--ctx", "1024", "--memory", "64MiB")


def content(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


TEXT = {"type": "text", "text": "x"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OF_MESSAGES = "use text, image, document, tool_use, tool_result, thinking or redacted_thinking"
REFUSED = [
    (CHAT, content(TEXT, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
     "messages.0.content.1: parts of type input_audio are not supported; use text, image_url, file or refusal"),
    (CHAT, content({"type": "file", "file": {"file_id": "a"}}),
     "messages.0.content.0.file: file_id is not supported; send file_data with "
     "data:application/pdf;base64,..."),
    (CHAT, content({"type": "file", "file": {"file_data": "data:text/plain;base64,eA=="}}),
     "a data: URL of a file must be data:application/pdf;base64, followed by a PDF in base64"),
    (CHAT, content({"type": "text"}), "messages.0.content.0.text: Field required"),
    (CHAT, content({"text": "x"}), "messages.0.content.0: the field type is missing"),
    (CHAT, content("x"), "messages.0.content.0: Input should be an object"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]},
     "messages.0.content: Input should be a valid string, or: Input should be a valid array"),
    (CHAT, {"messages": ASKED, "functions": [{"name": "a"}],
            "tools": [{"type": "function", "function": {"name": "a"}}]},
     "the body: tools and functions exclude each other; give tools"),
    (MESSAGES, {"max_tokens": 5, **content({"type": "search_result", "source": {}})},
     f"messages.0.content.0: parts of type search_result are not supported; {OF_MESSAGES}"),
    *((MESSAGES, {"max_tokens": 5, **content({"type": "document", "source": source})}, f"messages.0.content.0: {says}")
      for source, says in (
          ({"type": "url", "url": "https://a.example/a.pdf"},
           "documents with source type 'url' are not supported; send a PDF with source type 'base64'"),
          ({"type": "text", "media_type": "text/plain", "data": "x"},
           "documents with source type 'text' are not supported; send a PDF with source type 'base64'"),
          ({"type": "base64", "media_type": "text/plain", "data": "eA=="},
           "documents with media type 'text/plain' are not supported; send 'application/pdf'"))),
    (MESSAGES, {"max_tokens": 5, **content({"type": "image", "source": {"type": "file", "file_id": "a"}})},
     "messages.0.content.0.source: sources of type file are not supported; use base64 or url"),
    (MESSAGES, {"max_tokens": 5, **content({"type": "tool_result", "tool_use_id": "a", "content": [
        {"type": "search_result"}]})},
     "messages.0.content.0.content.0: parts of type search_result are not supported; use text, image or document"),
    (MESSAGES, {"max_tokens": 5, "messages": [*ASKED, {"role": "assistant", "content": [
        {"type": "image", "source": {"type": "url", "url": data_url(SCENE)}}]}, *ASKED]},
     "messages.1: only messages of the roles user and tool may have pictures"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
     "input.0.content.0: file_id is not supported; send file_data with data:application/pdf;base64,..."),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
     "input.0.content.0: parts of type input_audio are not supported; "
     "use input_text, output_text, text, input_image, input_file or refusal"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]},
     "input.0: items of type item_reference are not supported; "
     "use message, function_call, function_call_output or reasoning"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
    *((path, {**asked, "tool_choice": {"type": kind}},
       f"tool_choice: a choice of type {kind} is not supported; none, auto, required and one function are")
      for path, asked in ((RESPONSES, {"input": "x"}), (CHAT, {"messages": ASKED}))
      for kind in ("allowed_tools", "file_search")),
    *((RESPONSES, {"input": "x", name: value},
       f"{name}: /v1/chat/completions tells how likely tokens are, by logprobs and top_logprobs")
      for name, value in (("include", ["message.output_text.logprobs"]), ("top_logprobs", 2))),
    *((RESPONSES, {"input": "x", name: value},
       f"{name} is not supported, because this server stores no responses; send the whole conversation")
      for name, value in (("background", True), ("conversation", "c1"), ("prompt", {"id": "p1"}))),
    ("/completion", {"prompt": "x", "logit_bias": [[1]]}, "logit_bias.0: Field required"),
    (MESSAGES, {"max_tokens": 5, "messages": ASKED, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools.0.type: Input should be 'custom'"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "says"), REFUSED)
def test_what_is_not_understood_is_refused_by_its_name(server, path, body, says):
    assert check_refused(server.client.post(path, json=body))["message"] == says


def results(path):
    """Returns the same conversation in each of the three forms: a tool's result is a picture."""
    url = data_url(path)
    return {
        CHAT: {"messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                            {"role": "tool", "tool_call_id": "c1", "content": [TEXT, picture(path)]}]},
        MESSAGES: {"messages": [*ASKED, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c1", "name": "look", "input": {}}]}, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1",
                 "content": [TEXT, source_of(path)]}]}]},
        RESPONSES: {"input": [*ASKED, {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                              {"type": "function_call_output", "call_id": "c1", "output": [
                                  {"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": url}]}]},
    }  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_repeats_the_settings_of_its_request(server, streams):
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    tool = {"type": "function", "name": "look", "description": "Look.", "strict": True,
            "parameters": {"type": "object", "properties": {}}}  # fmt: skip
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    given = {"instructions": "Be short.", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 3, "tools": [tool],
             "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False,
             "metadata": {"a": "b"}}  # fmt: skip
    unsaid = {"instructions": None, "temperature": None, "top_p": None, "max_output_tokens": None, "tools": [],
              "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "truncation": "disabled",
              "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}}  # fmt: skip
    more = {"temperature": 0.0, "text": {"format": form}, "reasoning": {"effort": "none", "summary": None}}
    passed_over = {"include": ["reasoning.encrypted_content"], "truncation": "auto"}
    for asked, told in ((given, {**unsaid, **given}), (more, {**unsaid, **more})):
        made = client.responses.create(model="m", input="x", **asked, **passed_over, stream=streams)
        responses = [event.response for event in made if hasattr(event, "response")] if streams else [made]
        assert len(responses) == 1 + 2 * streams
        for response in responses:
            repeated = response.to_dict()
            assert {name: repeated[name] for name in told} == told


def test_pictures_of_results_are_seen_in_every_form(server):
    """The conversation includes the picture, so the later requests use the first one's prompt."""
    first = server.client.post(CHAT, json={**results(SCENE)[CHAT], "temperature": 0, "max_tokens": 24}).json()
    assert first["kvedge"][0]["tokens"]["image"] == 144
    n = first["usage"]["prompt_tokens"]
    for path, limit in ((MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")):
        answer = server.client.post(path, json={**results(SCENE)[path], limit: 4})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        there = usage.get("cache_read_input_tokens", usage.get("input_tokens_details", {}).get("cached_tokens"))
        assert there == n, usage
    other = server.client.post(MESSAGES, json={**results(OTHER)[MESSAGES], "max_tokens": 4}).json()["usage"]
    assert other["cache_read_input_tokens"] == 0


def test_a_request_changes_the_servers_plan_where_it_says_so():
    """A request must not drop the server's other options. A budget of 1 is a share: JavaScript writes 1 for 1.0."""
    pruned = {"image_tokens": 0.5, "pruner": "random", "pruner.seed": 3}
    default = pykvedge.plan("snapkv", 0.2, sinks=16, **{"scorer.window": 4}, **pruned)

    def asked(**given):
        return plan_of(Compression(**given), default)

    assert asked(budget=0.3) == default.with_(budget=0.3) == asked(budget=0.3, method="snapkv")
    assert asked(budget=1).budget.ratio == 1.0 == asked(image_tokens=1).image_tokens.ratio
    assert asked(settings={"scorer.window": 9, "sinks": 2}).as_text() == {
        **default.as_text(), "scorer.window": "9", "sinks": "2"}
    assert asked(settings={"scorer": "vnorm"}).params == {"pruner.seed": 3}
    assert asked(method="h2o", budget=9) == pykvedge.plan("h2o", 9, **pruned)
    assert asked(method="h2o", pruner="grid") == pykvedge.plan("h2o", image_tokens=0.5, pruner="grid")
    assert another(default, "h2o", 9) == asked(method="h2o", budget=9)
    for wrong in ({"settings": {"sink": 3}}, {"settings": {"recent": "x"}}, {"settings": {"scorer.x": 1}}):
        with pytest.raises(UsageError):
            asked(**wrong)
    with pytest.raises(BudgetError, match="keeps all KV pairs"):
        plan_of(Compression(budget=0.3), pykvedge.plan("full"))


def test_functions_allow_one_call_as_their_answer_has_one():
    assert ChatRequest(messages=ASKED, functions=[{"name": "look"}]).parallel_tool_calls is False


def test_functions_are_tools_under_older_names(server):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    fields = {"functions": [{"name": "paint", "parameters": schema}], "function_call": {"name": "paint"}}
    said = asks("Paint it.", SCENE)
    choice = server.chat(said, max_tokens=200, **fields).json()["choices"][0]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"]["name"] == "paint"
    lines = server.chat(said, max_tokens=200, stream=True, **fields).text.splitlines()
    assert any('"function_call": {"name": "paint"' in line for line in lines)
    assert any('"finish_reason": "function_call"' in line for line in lines)
    assert not any("tool_calls" in line for line in lines)
    older = [{"role": "assistant", "content": None, "function_call": choice["message"]["function_call"]},
             {"role": "function", "name": "paint", "content": "done"}]  # fmt: skip
    call = {"id": "", "function": choice["message"]["function_call"]}
    newer = [{"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "name": "paint", "content": "done"}]  # fmt: skip
    first, second = (server.chat([*said, *turns]).json() for turns in (newer, older))
    assert cached(second) == first["usage"]["prompt_tokens"]


def test_no_limit_is_said_as_minus_one(server):
    free = {"max_tokens": -1, "top_k": -1, "repeat_last_n": -1, "repeat_penalty": 1.1, "temperature": 0}
    answer = server.chat(asks("Describe the image.", SCENE), **free).json()["choices"][0]
    assert answer["finish_reason"] == "stop" and len(answer["message"]["content"]) > 40
    few = server.chat(asks("Describe the image.", SCENE), max_completion_tokens=3, max_tokens=-1).json()
    assert few["usage"]["completion_tokens"] == 3


def test_a_prompt_may_be_read_and_not_answered(server):
    said = asks("Read this ahead.", SCENE)
    ahead = server.chat(said, max_tokens=0).json()
    assert ahead["choices"][0]["message"]["content"] == "" and ahead["choices"][0]["finish_reason"] == "length"
    assert ahead["usage"]["completion_tokens"] == 0
    assert cached(server.chat(said).json()) == ahead["usage"]["prompt_tokens"]


def test_answers_that_nobody_makes_repeatable_differ(server):
    def texts(**fields):
        asked = {"messages": asks("Say anything at all."), "max_tokens": 24, **fields}
        answer = server.client.post(CHAT, json=asked).json()
        return [choice["message"]["content"] for choice in answer["choices"]]

    assert len(set(texts(n=8))) > 4  # without a temperature in the request
    assert len(set(texts(n=3, temperature=0))) == 1 and texts() == texts(n=3, temperature=0)[:1]
    seeds = [texts(temperature=1.5, n=8, seed=seed) for seed in (5, 5, -1, -1)]
    assert seeds[0] == seeds[1] and seeds[2] != seeds[3]
