"""`kvedge serve`: the beginning of streams, and the signs of life before the first token."""

import json
import threading

import httpx
import pytest
from server import ENDLESS

ASKED = [{"role": "user", "content": "What is there?"}]
FORMS = [
    ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 4}),
    ("/v1/messages", {"messages": ASKED, "max_tokens": 4}),
    ("/v1/responses", {"input": "What is there?", "max_output_tokens": 4}),
    ("/completion", {"prompt": "What is there?", "n_predict": 4}),
]

ENDS = ("[DONE]", "message_stop", "response.completed", '"stop": true')
SERVED = ("--ctx", "4096", "--parallel", "1")


@pytest.fixture
def busy(server):
    """Starts an endless answer that blocks all others. Yields a function that ends it."""
    asked, over, begun = {"messages": ASKED, "stream": True, "grammar": ENDLESS}, threading.Event(), threading.Event()

    def ask():
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=60) as answer:
            for _ in answer.iter_lines():
                begun.set()
                if over.is_set():
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(60)
    yield over.set
    over.set()
    thread.join()


@pytest.mark.parametrize(("path", "body"), FORMS, ids=[path for path, _ in FORMS])
def test_a_stream_begins_before_its_first_word(server, busy, path, body):
    with httpx.stream("POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200 and next(lines).startswith((":", "event: response.created"))
        busy()  # nobody was answered before
        rest = "\n".join(lines)
    assert '"error": {' not in rest and any(end in rest for end in ENDS)


def test_clients_pass_over_what_keeps_a_stream_alive(server, busy):
    import anthropic
    import openai

    other = anthropic.Anthropic(base_url=server.url, api_key="none")
    with other.messages.stream(model="any", messages=ASKED, max_tokens=4) as events:
        busy()
        message = events.get_final_message()
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 5
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    chunks = list(client.chat.completions.create(model="any", messages=ASKED, max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason


def test_an_error_that_is_known_at_once_has_its_status(server):
    for path, body in FORMS:
        for wrong, status in (({"temperature": -1}, 400), ({"kvedge": {"method": "magic"}}, 400)):
            assert server.client.post(path, json={**body, "stream": True, **wrong}).status_code == status
    long = [{"role": "user", "content": "word " * 8000}]
    assert server.chat(long, stream=True).status_code == 400


def test_what_goes_wrong_later_is_the_last_event(server, busy):
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", timeout=60, json={
        "messages": ASKED, "stream": True, "max_tokens": 4}) as answer:  # fmt: skip
        assert answer.status_code == 200
        [job] = [one for one in server.sessions() if one["state"] == "ready"]
        assert server.client.delete(f"/v1/kvedge/sessions/{job['id']}").status_code == 200
        busy()
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["error"]["code"] == "cancelled"
