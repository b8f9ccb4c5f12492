"""A client that repeats a request, or wants several answers, does not wait for the prompt again."""

import pytest
from server import QUESTION, SCENES, asks, cached, then

PLANS = (
    {"method": "full"},
    {"method": "lookm", "budget": 0.2},
    {"method": "prefixkv", "budget": 0.3},
    {"method": "h2o", "budget": 0.2, "settings": {"decode": "heavy-hitter"}},
    {"method": "mixkv", "budget": 0.2, "settings": {"decode": "sliding"}},
    {"method": "snapkv", "budget": 0.3, "image_tokens": 0.5},
)
SERVED = ("--memory", "64MiB", "--parallel", "4", "--ctx", "2048")


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan["method"])
def test_the_same_prompt_is_read_once(server, plan):
    said, fields = asks(QUESTION, SCENES[0]), {"kvedge": plan, "logprobs": True, "top_logprobs": 3, "max_tokens": 40}
    first, second = (server.chat(said, **fields).json() for _ in range(2))
    assert cached(first) == 0 < cached(second) == first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    of_first, of_second = ([t["logprob"] for t in a["choices"][0]["logprobs"]["content"]] for a in (first, second))
    assert of_second == pytest.approx(of_first, abs=1e-4) and of_second[0] == of_first[0]
    kept = ("full_bytes", "kept_bytes", "kept_per_layer")
    assert [second["kvedge"][0]["kv"][name] for name in kept] == [first["kvedge"][0]["kv"][name] for name in kept]


def test_a_conversation_goes_on_from_a_repeated_prompt(server):
    said = asks("Describe the image.", SCENES[1])
    text = server.text(said, max_tokens=64)
    assert server.text(said, max_tokens=64) == text
    more = then(said, text, "What is the code?")
    went_on = server.chat(more).json()
    assert cached(went_on) > 150
    repeated = server.chat(more).json()
    assert cached(repeated) == repeated["usage"]["prompt_tokens"] == went_on["usage"]["prompt_tokens"]
    assert repeated["choices"][0]["message"] == went_on["choices"][0]["message"]


def test_several_answers_share_one_prompt(server):
    before = server.metric("reused_tokens_total")
    several = server.chat(asks("What do you see?", SCENES[2]), n=4, temperature=1, seed=3, max_tokens=30).json()
    n_prompt = several["usage"]["prompt_tokens"]
    assert server.metric("reused_tokens_total") - before == 3 * n_prompt
    alone = [
        server.text(asks("What do you see?", SCENES[2]), temperature=1, seed=3 + i, max_tokens=30) for i in range(4)
    ]
    assert [choice["message"]["content"] for choice in several["choices"]] == alone


def test_patches_are_shown_of_a_prompt_that_is_there(server):
    said = asks("Where is it?", SCENES[0])
    server.text(said)
    shown = server.chat(said, kvedge={"patches": True}).json()["kvedge"][0]
    assert shown["patches"]["images"]


def test_an_answer_that_was_begun_is_gone_on_with(server):
    said = asks("Describe the image.", SCENES[2])
    whole = server.text(said, max_tokens=64)
    words = whole.split(" ")
    begun, rest = " ".join(words[:4]), " " + " ".join(words[4:])
    going, full = [*said, {"role": "assistant", "content": begun}], {"kvedge": {"method": "full"}, "max_tokens": 64}
    assert server.text(going, **full) == server.text(said, **full).removeprefix(begun)
    went_on = server.text(going, max_tokens=64)
    assert went_on == rest
    assert cached(server.chat(then(said, begun + went_on, QUESTION)).json()) > 150
    message = {"model": "demo-model", "max_tokens": 64, "temperature": 0, "messages": [
        {"role": "user", "content": "Say anything."}, {"role": "assistant", "content": "It is"}]}  # fmt: skip
    answer = server.client.post("/v1/messages", json=message)
    assert answer.status_code == 200 and answer.json()["content"][0]["text"]
