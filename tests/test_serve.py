"""`kvedge serve` answers as a session does, also when other clients ask at the same time."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server import ENDLESS, GOES_ON, SCENES, asks, cached, check_refused, data_url, serving, source_of, then

import pykvedge

QUESTIONS = ("How many shapes are there?", "What is at the top left?", "Which color is the circle?", "What is there?")
PLAN = ("--method", "lookm", "--budget", "0.3")
SERVED = (*PLAN, "--memory", "64MiB", "--parallel", "4", "--ctx", "2048")


@pytest.fixture(scope="module")
def told(demo_model):
    """The answers of sessions to each question about each scene, and to a second question."""
    out = {}
    for path in SCENES[:3]:
        for question in QUESTIONS[:3]:
            with pykvedge.Session(demo_model, plan=pykvedge.plan("lookm", 0.3)) as session:
                sampling = pykvedge.Sampling(max_tokens=24)
                first = session.ask(question, path, sampling).read()
                out[path, question] = (first, session.ask(QUESTIONS[3], (), sampling).read())
    return out


def test_answers_are_a_sessions_alone_and_side_by_side(server, told):
    def both(key):
        path, question = key
        said = asks(question, path)
        first = server.text(said)
        second = server.chat(then(said, first, QUESTIONS[3])).json()
        return first, second["choices"][0]["message"]["content"], cached(second)

    for key in list(told)[:2]:
        assert both(key)[:2] == told[key]
    with ThreadPoolExecutor(6) as pool:
        found = dict(zip(told, pool.map(both, told), strict=True))
    assert {key: two[:2] for key, two in found.items()} == told
    assert all(n > 100 for *_, n in found.values())  # the second message goes on from the first one's rows


def test_a_stream_is_the_answer_in_pieces(server):
    said = asks(QUESTIONS[0], SCENES[0])
    whole = server.chat(said, logprobs=True, top_logprobs=2).json()["choices"][0]
    fields = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 24}
    with server.client.stream("POST", "/v1/chat/completions", json={"messages": said, **fields}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1]) == whole["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == whole["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(whole["logprobs"]["content"])
    first = whole["logprobs"]["content"][0]
    assert first["logprob"] == first["top_logprobs"][0]["logprob"] and len(first["top_logprobs"]) == 2


def test_what_is_kept_is_chosen_by_each_request(server):
    def kept(**choice):
        answer = server.chat(asks(QUESTIONS[0], SCENES[1]), kvedge=choice).json()["kvedge"][0]
        return answer["method"], answer["kv"]["kept_bytes"] / answer["kv"]["full_bytes"]

    assert kept() == ("lookm", pytest.approx(0.3, abs=0.05))
    assert kept(method="full") == ("full", pytest.approx(1.0))
    assert kept(method="knorm", budget=0.1) == ("knorm", pytest.approx(0.1, abs=0.05))
    name = server.client.get("/v1/models").json()["data"][0]["id"]
    named = (("knorm-0.1", "knorm", 0.1), ("streaming-llm-64", "streaming-llm", 0.4), ("full", "full", 1.0))
    for plan, method, share in named:
        told = server.chat(asks(QUESTIONS[0], SCENES[1]), model=f"{name}@{plan}").json()["kvedge"][0]
        assert told["method"] == method
        assert told["kv"]["kept_bytes"] / told["kv"]["full_bytes"] == pytest.approx(share, abs=0.05)
    check_refused(server.chat(asks("?"), model=f"{name}@nothing-0.2"), "unknown method")
    for other in (f"other@{plan}", f"{name}@@{plan}"):  # an error, not the default plan
        error = check_refused(server.chat(asks("?"), model=other))
        assert error["message"] == f"'{other}' names another model; this server has {name}@{plan}"
    assert server.chat(asks("?"), model="gpt@latest", max_tokens=1).status_code == 200
    assert server.chat(asks("?"), model="another@nothing-0.2", max_tokens=2).status_code == 200
    plan = server.client.post("/v1/kvedge/plan", json={"method": "snapkv", "budget": 0.5, "image_tokens": 0.5}).json()
    assert plan == json.loads(pykvedge.plan("snapkv", 0.5, image_tokens=0.5).to_json())
    check_refused(server.chat(asks("?", SCENES[0]), kvedge={"method": "nothing"}), "unknown method")


def test_forms_stops_and_choices(server):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    text = server.text(asks(QUESTIONS[0], SCENES[0]), response_format=form, max_tokens=200)
    assert isinstance(json.loads(text)["n"], int)
    tools = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    forced = server.chat(asks("Paint it.", SCENES[0]), tools=tools, tool_choice="required", max_tokens=200).json()
    call = forced["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "paint" and isinstance(json.loads(call["arguments"])["n"], int)
    assert forced["choices"][0]["finish_reason"] == "tool_calls"
    assert server.text(asks(QUESTIONS[0], SCENES[0]), grammar='root ::= "yes" | "no"') in ("yes", "no")
    several = server.chat(asks("What is there?", SCENES[0]), n=3, temperature=1, seed=7).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    again = server.chat(asks("What is there?", SCENES[0]), n=3, temperature=1, seed=7).json()
    assert [c["message"] for c in several["choices"]] == [c["message"] for c in again["choices"]]


def test_clients_of_others(server):
    import anthropic
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    said = asks(QUESTIONS[0], SCENES[0])
    text = server.text(said)
    done = client.chat.completions.create(model="any", messages=said, temperature=0, max_tokens=24)
    assert done.choices[0].message.content == text
    stream = client.chat.completions.create(model="any", messages=said, temperature=0, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    content = [{"type": "input_image", "image_url": data_url(SCENES[0]), "detail": "auto"},
               {"type": "input_text", "text": QUESTIONS[0]}]  # fmt: skip
    asked = {"model": "any", "input": [{"role": "user", "content": content}], "temperature": 0}
    assert client.responses.create(**asked).output_text == text
    with client.responses.stream(**asked) as events:
        assert events.until_done().get_final_response().output_text == text
    assert [model.id for model in client.models.list()] == [server.told["model"]]
    other = anthropic.Anthropic(base_url=server.url, api_key="none")
    parts = [source_of(SCENES[0]), {"type": "text", "text": QUESTIONS[0]}]
    message = {"model": "any", "max_tokens": 24, "messages": [{"role": "user", "content": parts}], "temperature": 0}
    extra = {"extra_body": {"temperature": message.pop("temperature")}}
    assert other.messages.create(**message, **extra).content[0].text == text
    with other.messages.stream(**message, **extra) as events:
        assert "".join(events.text_stream) == text


def test_tokens_are_counted_before_they_are_read(server):
    import anthropic

    other = anthropic.Anthropic(base_url=server.url, api_key="none")
    messages = [{"role": "user", "content": [source_of(SCENES[0]), {"type": "text", "text": QUESTIONS[0]}]}]
    read = server.metric("prompt_tokens_total")
    n = other.messages.count_tokens(model="any", messages=messages).input_tokens
    assert n > 144 and server.metric("prompt_tokens_total") == read
    form = {"type": "json_schema", "schema": {"enum": ["x", "y"]}}
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        done = other.messages.create(model="any", messages=messages, max_tokens=9, extra_body=body)
        assert done.content[0].text in ('"x"', '"y"')
    with other.messages.stream(model="any", messages=messages, max_tokens=4) as events:
        first = next(iter(events))
    cached = first.message.usage.cache_read_input_tokens
    assert first.type == "message_start" and first.message.usage.input_tokens + cached == n
    half = {"extra_body": {"kvedge": {"image_tokens": 0.5}}}
    assert other.messages.count_tokens(model="any", messages=messages, **half).input_tokens == n - 72
    bad = server.client.post("/v1/messages/count_tokens", json={"messages": []})
    assert bad.status_code == 400 and bad.json()["type"] == "error"


def test_an_answer_has_one_form(server):
    schema = {"const": "yes"}
    assert server.text(asks(QUESTIONS[0]), json_schema=schema) == '"yes"'
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    check_refused(server.chat(asks(QUESTIONS[0]), json_schema=schema, response_format=form), "exclude each other")
    assert server.text(asks(QUESTIONS[0]), regex="(yes|no)!") in ("yes!", "no!")
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    assert int(server.text(asks(QUESTIONS[0]), json_schema=digit)) in range(10)
    for fields, word in (({"json_schema": {"not": {}}}, '"not"'), ({"regex": "("}, "regular expression")):
        check_refused(server.chat(asks(QUESTIONS[0]), **fields), word)


def test_forms_that_take_long_stop_nobody(server):
    """While such a request is refused or answered, another answer goes on."""
    hard = [
        {"json_schema": {"type": "string", "pattern": "^" + "a?" * 1500 + "b$"}},
        {"json_schema": {"type": "integer", "multipleOf": 999983}},
        {"json_schema": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(60)]}},
    ]
    with server.endless(asks("?", SCENES[0]), max_tokens=1900) as lines:
        for fields in hard:
            assert server.chat(asks(QUESTIONS[0]), **fields, max_tokens=20).status_code == 400
        assert next(line for line in lines if GOES_ON in line)


def test_who_leaves_ends_the_answer(server):
    server.wait_for("requests_running", 0)  # the previous test has left
    before = server.metric('answers_total{finish="cancelled"}')
    with server.endless(asks("What is there?", SCENES[0])):
        pass
    server.wait_for('answers_total{finish="cancelled"}', before + 1)
    server.wait_for("requests_running", 0)
    assert server.metric("kv_bytes") == 0


def test_memory_is_bounded_and_what_waits_comes_back(environment):
    """12 conversations with room for few go on from their rows, with the answers of a server with room for all."""

    def talks(memory):
        with serving(environment, *PLAN, "--memory", memory, "--ctx", "1024") as server:
            said = [asks(f"{i}: {QUESTIONS[i % 3]}", SCENES[i % len(SCENES)]) for i in range(12)]
            more, out = [then(one, server.text(one), QUESTIONS[3]) for one in said], []
            for conversation in more:
                answer = server.chat(conversation).json()
                out.append((answer["choices"][0]["message"]["content"], answer["usage"], cached(answer)))
                held = server.memory()
                assert held["kv_bytes"] + held["parked_bytes"] <= held["limit_bytes"]
            return out, held

    few, held = talks("1MiB")
    assert held["folder_bytes"] > 0 < held["parked_bytes"]
    many, free = talks("64MiB")
    assert few == many and free["folder_bytes"] == 0
    assert all(n for *_, n in few)


def test_the_bound_of_memory_holds_all_the_time(environment):
    """The limit of memory is checked often, while conversations are read, answered, kept and parked side by side."""
    with serving(environment, *PLAN, "--memory", "2MiB", "--ctx", "1024", "--parallel", "4") as server:
        over, most = threading.Event(), []

        def look():
            with httpx.Client(base_url=server.url) as client:
                while not over.is_set():
                    held = client.get("/v1/kvedge/memory").json()
                    most.append((held["kv_bytes"] + held["parked_bytes"]) / held["limit_bytes"])

        def talk(number):
            said = asks(f"{number % 7}: {QUESTIONS[number % 3]}", SCENES[number % len(SCENES)])
            return server.text(then(said, server.text(said), QUESTIONS[3]))

        looking = threading.Thread(target=look)
        looking.start()
        try:
            with ThreadPoolExecutor(6) as pool:
                list(pool.map(talk, range(30)))
        finally:
            over.set()
            looking.join()
        assert len(most) > 10 and 0.5 < max(most) <= 1.0


def test_pictures_of_a_conversation_need_no_encoder_again(server):
    said = asks(QUESTIONS[0], SCENES[2])
    server.text(said)
    again = server.chat(asks("And what is that?", SCENES[2])).json()["kvedge"][0]
    assert again["tokens"]["images_reused"] == 1


def test_many_at_once_are_refused_in_time(environment):
    with serving(environment, "--parallel", "1", "--queue", "1", "--ctx", "1024") as server:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(server.chat, asks("?", SCENES[0]), max_tokens=200, grammar=ENDLESS) for _ in range(8)]
        statuses = [one.result() for one in asked]
        refused = [answer for answer in statuses if answer.status_code == 503]
        assert refused and all(int(answer.headers["retry-after"]) > 0 for answer in refused)
        assert {answer.status_code for answer in statuses} == {200, 503}
        assert server.text(asks("?", SCENES[0])) is not None
