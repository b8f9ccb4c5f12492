"""Routes of llama-server, and OpenAI's older completions: prompts without a chat template."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server import DEMO, ENDLESS, QUESTION, SCENES, asks, check_refused, data_url, serving

import pykvedge
from pykvedge.models.model import Model

PROMPT = "USER: Say anything.\nASSISTANT:"
GREEDY = {"temperature": 0}
SPECIAL = "</s>"
SERVED = ("--ctx", "1024", "--memory", "64MiB", "--parallel", "3")


@pytest.fixture(scope="module")
def model(native):
    """The vocabulary of the server's model, loaded separately."""
    one = Model(DEMO / "demo-model.gguf", vocabulary_only=True)
    yield one
    one.close()


def post(server, path, **body):
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server, path, **body):
    answer = server.client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: " and line[6:] != "[DONE]"]


# ----------------------------------------------------------------------------------------------- properties


def test_what_the_model_is(server, model):
    props = server.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 1024 and props["total_slots"] == 3
    assert props["default_generation_settings"]["params"]["temperature"] == 0
    params = props["default_generation_settings"]["params"]
    assert params["n_predict"] == params["adaptive_target"] == -1 and params["mirostat"] == 0
    assert props["modalities"] == {"vision": True, "audio": False, "video": False}
    assert props["chat_template"] == model.chat_template() and props["model_path"] == "demo-model.gguf"
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>") and props["model_alias"] == server.told["model"]
    assert props["chat_template_caps"]["supports_tool_calls"] is False
    assert props["kvedge"]["plan"]["method"] == "kvedge" and props["kvedge"]["tuned"] is None
    models = server.client.get("/v1/models").json()
    assert models["models"][0]["capabilities"] == ["completion", "multimodal"]
    [listed] = models["data"]
    assert listed["architecture"]["input_modalities"] == ["text", "image"] and listed["max_model_len"] == 1024
    assert listed["meta"]["n_ctx"] == 1024 and listed["meta"]["n_vocab"] == model.n_vocab
    assert listed["meta"]["size"] <= (DEMO / "demo-model.gguf").stat().st_size < 1.2 * listed["meta"]["size"]
    assert 2e6 < listed["meta"]["n_params"] < 4e6
    for path in ("/health", "/v1/health"):
        assert server.client.get(path).json()["status"] == "ok"


def test_a_server_without_an_encoder_says_so(environment):
    options = ("--model", DEMO / "demo-model.gguf", "--mmproj", "none", "--ctx", "512", "--temp", "1.5", "--seed", "7")
    with serving(environment, *options, "--allow-origin", "localhost") as blind:
        for origin in ("http://localhost:3000", "http://[::1]", "http://localhost.evil.example"):
            headers = {"origin": origin, "access-control-request-method": "POST"}
            told = blind.client.options("/completion", headers=headers).headers
            assert told.get("access-control-allow-origin") == (None if "evil" in origin else origin)
        assert blind.client.get("/props").json()["default_generation_settings"]["params"]["temperature"] == 1.5
        asked = {"prompt": "a", "n_predict": 12}
        assert len({post(blind, "/completion", **asked)["content"] for _ in range(6)}) == 1
        assert len({post(blind, "/completion", seed=-1, **asked)["content"] for _ in range(6)}) > 1
        assert blind.client.get("/props").json()["modalities"]["vision"] is False
        assert blind.client.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"] == ["text"]
        picture = {"prompt_string": "<__media__>?", "multimodal_data": [data_url(SCENES[0]).partition(",")[2]]}
        check_refused(blind.client.post("/completion", json={"prompt": picture}), "without an image encoder")


def test_slots_are_those_that_answer(server):
    idle = server.client.get("/slots").json()
    assert [slot["id"] for slot in idle] == [0, 1, 2] and not any(slot["is_processing"] for slot in idle)
    seen = []
    with ThreadPoolExecutor(1) as pool:
        long = {"prompt": "a", "grammar": ENDLESS, "n_predict": 900, "n_probs": 20}
        asked = pool.submit(server.client.post, "/completion", json=long)
        with httpx.Client(base_url=server.url) as other:
            while not asked.done():
                seen += [slot for slot in other.get("/slots").json() if slot["is_processing"]]
    assert asked.result().status_code == 200, asked.result().text
    assert seen and {slot["id"] for slot in seen} == {0} and all(slot["n_ctx"] == 1024 for slot in seen)
    decoded = [slot["next_token"][0]["n_decoded"] for slot in seen]
    assert decoded == sorted(decoded) and 0 < decoded[-1] <= 900


@pytest.mark.parametrize("text", ["What is there?", " two  blanks ", "\u00fcber \u56fe \U0001f917", f"a{SPECIAL}b", ""])
@pytest.mark.parametrize("special", [True, False])
def test_text_becomes_tokens_and_text_again(server, model, text, special):
    asked = {"content": text, "parse_special": special}
    tokens = post(server, "/tokenize", **asked)["tokens"]
    assert tokens == model.tokenize(text, special=special)
    bos = [model.llama.llama_vocab_bos(model.vocab)] if model.adds_bos else []
    assert post(server, "/tokenize", **asked, add_special=True)["tokens"] == bos + tokens
    again = post(server, "/detokenize", tokens=tokens)["content"].strip()
    assert again == text.strip() or again.replace(" ", "") == text  # a space may follow a special token
    pieces = post(server, "/tokenize", **asked, with_pieces=True)["tokens"]
    assert [one["id"] for one in pieces] == tokens
    raw = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in (one["piece"] for one in pieces))
    assert raw.decode().replace(" ", "") == text.replace(" ", "")
    assert post(server, "/tokenize", **{**asked, "content": [5, text, 7]})["tokens"] == [5, *tokens, 7]


def test_tokens_that_are_none(server, model):
    for tokens in ([-1], [model.n_vocab], [2**40]):
        bodies = [("/detokenize", {"tokens": tokens}), ("/completion", {"prompt": tokens})]
        bodies += [("/tokenize", {"content": tokens, "with_pieces": pieces}) for pieces in (False, True)]
        for path, body in (*bodies, ("/completion", {"prompt": [1, *tokens]})):
            check_refused(server.client.post(path, json=body), "no token")


def test_a_template_is_applied_and_its_prompt_answered_as_the_conversation_is(server):
    said = [{"role": "system", "content": "Be short."}, *asks("Say anything.")]
    prompt = post(server, "/apply-template", messages=said)["prompt"]
    assert prompt == "Be short.\n\nUSER: Say anything.\nASSISTANT:"
    whole = server.chat(said).json()
    answer = post(server, "/completion", prompt=prompt, n_predict=24, **GREEDY)
    assert answer["content"].strip() == whole["choices"][0]["message"]["content"]
    assert answer["tokens_evaluated"] == whole["usage"]["prompt_tokens"]
    typed = post(server, "/apply-template", messages=asks(f"a{SPECIAL}b"))["prompt"]
    assert typed == f"USER: a{SPECIAL}b\nASSISTANT:"


def test_who_goes_on_is_said_as_to_other_servers(server):
    said = asks("Say anything.")
    asked, bare = (
        post(server, "/apply-template", messages=said, add_generation_prompt=on)["prompt"] for on in (True, False)
    )
    assert asked == bare + "ASSISTANT:"
    begun = [*said, {"role": "assistant", "content": "There is"}]
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert post(server, "/apply-template", messages=begun, **more)["prompt"] == f"{asked} There is"
    on, off = {"continue_final_message": True}, {"add_generation_prompt": False}
    for messages, more in ((begun, {**on, "add_generation_prompt": True}), (said, on), (said, off)):
        assert server.chat(messages, **more).status_code == 400


# ---------------------------------------------------------------------------------------------------------- /completion


def test_a_completion_is_what_the_model_goes_on_with(server, model):
    asked = {"prompt": PROMPT, "n_predict": 8, "return_tokens": True, "n_probs": 3, "cache_prompt": False}
    answer = post(server, "/completion", **asked, **GREEDY)
    with pykvedge.Session(DEMO / "demo-model.gguf", threads=1) as session:
        alone = session.ask("Say anything.", (), pykvedge.Sampling(max_tokens=8)).read()
    assert answer["content"].strip() == alone.strip()
    n = len(answer["tokens"])
    assert answer["stop"] is True and answer["stop_type"] in ("eos", "limit") and answer["truncated"] is False
    assert model.text(answer["tokens"]).strip() == alone.strip() and answer["tokens_predicted"] == n
    assert answer["tokens_evaluated"] == len(model.tokenize(PROMPT, begins=True)) and answer["prompt"].endswith(PROMPT)
    assert [one["id"] for one in answer["completion_probabilities"]] == answer["tokens"]
    for one in answer["completion_probabilities"]:
        assert one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0 and len(one["top_logprobs"]) == 3
    settings = answer["generation_settings"]
    assert settings["n_predict"] == 8 and settings["temperature"] == 0 and settings["seed"] == 2**32 - 1
    times = answer["timings"]
    assert times["predicted_n"] == n and times["prompt_n"] + times["cache_n"] == answer["tokens_evaluated"]
    assert times["prompt_per_second"] == pytest.approx(1000 * times["prompt_n"] / times["prompt_ms"])


def test_a_stream_has_each_token_and_ends_with_the_figures(server):
    asked = {"prompt": PROMPT, "n_predict": 8, "n_probs": 2, **GREEDY}
    whole, parts = post(server, "/completion", **asked, return_tokens=True), streamed(server, "/completion", **asked)
    *told, last = parts
    assert "".join(part["content"] for part in told) == whole["content"] and last["content"] == ""
    assert [token for part in told for token in part["tokens"]] == whole["tokens"]
    assert all(not part["stop"] and len(part["completion_probabilities"]) == 1 for part in told) and last["stop"]
    assert last["timings"]["predicted_n"] == len(whole["tokens"]) and last["stop_type"] == whole["stop_type"]


def test_a_stream_tells_how_far_its_prompt_was_read_and_how_fast_it_is(server):
    text = "USER: " + "How far? " * 100
    forms = (("/completion", {"prompt": text, "n_predict": 9, "grammar": ENDLESS}),
             ("/v1/chat/completions", {"messages": asks(text), "max_tokens": 9, "grammar": ENDLESS}))  # fmt: skip
    for path, asked in forms:
        for again in (False, True):
            parts = streamed(server, path, **asked, return_progress=True, timings_per_token=True)
            read = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
            done = [one["processed"] for one in read]
            times = [part["timings"] for part in parts if "timings" in part]
            n = times[-1]["prompt_n"] + times[-1]["cache_n"]
            took = [one["time_ms"] for one in read]
            assert took == sorted(took) and took[0] == 0 and (again or took[-1] > 0)
            assert done == sorted(set(done)) and done[0] == read[0]["cache"] and done[-1] == n
            assert {(one["total"], one["cache"]) for one in read} == {(n, n if again else 0)}
            assert [one["predicted_n"] for one in times] == sorted(one["predicted_n"] for one in times)
            assert len(times) > len(read) + 1 and times[0]["prompt_n"] == 0 and times[-1]["predicted_n"] == 9
            plain = streamed(server, path, **asked)
            if path != "/completion":
                assert plain[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
            assert not any("prompt_progress" in part for part in plain)
            assert sum("timings" in part for part in plain) == 1


def test_prompts_may_be_tokens_and_several(server, model):
    tokens = model.tokenize(PROMPT, begins=True)
    asked = {"n_predict": 8, **GREEDY}
    alone = post(server, "/completion", prompt=PROMPT, **asked)["content"]
    assert post(server, "/completion", prompt=tokens, **asked)["content"] == alone
    mixed = [*tokens[:1], *model.tokenize("USER:"), *model.tokenize(" Say anything.\nASSISTANT:")]
    assert post(server, "/completion", prompt=mixed, **asked)["tokens_evaluated"] == len(mixed)
    for several in ([PROMPT, tokens], [tokens, {"prompt_string": PROMPT}]):
        answers = post(server, "/completion", prompt=several, **asked)
        assert [(one["index"], one["content"]) for one in answers] == [(0, alone), (1, alone)]
    assert len({one["seed"] for one in (a["generation_settings"] for a in post(
        server, "/completion", prompt=PROMPT, n_cmpl=3, seed=5, temperature=1))}) == 3  # fmt: skip


def test_special_tokens_of_a_prompt_are_what_they_are_called(server, model):
    """In a raw prompt, the text of a special token is this token; in a conversation it stays text."""
    end = model.llama.llama_vocab_eos(model.vocab)
    assert end in model.tokenize(f"a{SPECIAL}b")
    n = len(model.tokenize(f"a{SPECIAL}b", begins=True))
    assert post(server, "/completion", prompt=f"a{SPECIAL}b", n_predict=1)["tokens_evaluated"] == n
    before = post(server, "/v1/messages/count_tokens", messages=asks("ab"))["input_tokens"]
    typed = post(server, "/v1/messages/count_tokens", messages=asks(f"a{SPECIAL}b"))["input_tokens"]
    assert typed - before > 1
    plain = server.chat(asks(f"<image> {SPECIAL} hello")).json()["kvedge"][0]
    assert plain["tokens"]["image"] == 0  # nor is the word <image> a picture


def test_a_prompt_has_pictures_at_its_markers(server):
    marker = server.client.get("/props").json()["media_marker"]
    said = asks(QUESTION, SCENES[0])
    written = post(server, "/apply-template", messages=said)["prompt"]
    assert written.count(marker) == 1
    prompt = {"prompt_string": written, "multimodal_data": [data_url(SCENES[0]).partition(",")[2]]}
    answer = post(server, "/completion", prompt=prompt, n_predict=24, **GREEDY)
    whole = server.chat(said).json()
    assert answer["content"].strip() == whole["choices"][0]["message"]["content"]
    assert answer["tokens_evaluated"] == whole["usage"]["prompt_tokens"]
    usual = {**prompt, "prompt_string": written.replace(marker, "<__media__>")}
    again = post(server, "/completion", prompt=usual, n_predict=24, **GREEDY)
    assert (again["content"], again["tokens_evaluated"]) == (answer["content"], answer["tokens_evaluated"])
    for wrong in ({**prompt, "prompt_string": "no marker"}, {**prompt, "multimodal_data": ["%%%"]}):
        assert server.client.post("/completion", json={"prompt": wrong}).status_code == 400


def test_the_same_prompt_is_read_once_unless_that_is_not_wanted(server):
    asked = {"prompt": "USER: Only once.\nASSISTANT:", "n_predict": 2, **GREEDY}
    alone = {**asked, "prompt": "USER: Never kept.\nASSISTANT:", "cache_prompt": False}
    for body, kept in ((asked, True), (alone, False)):
        first, second = (post(server, "/completion", **body)["timings"]["cache_n"] for _ in range(2))
        assert first == 0 and bool(second) is kept
    waiting = server.memory()["parked_conversations"]
    post(server, "/completion", **{**asked, "prompt": "USER: No conversation.\nASSISTANT:"})
    assert server.memory()["parked_conversations"] == waiting


def test_what_ends_and_forms_a_completion(server, model):
    free = post(server, "/completion", prompt=PROMPT, n_predict=12, **GREEDY)["content"]
    word = free.split()[1] if len(free.split()) > 1 else free[2:]
    stopped = post(server, "/completion", prompt=PROMPT, n_predict=12, stop=["nothing", word], **GREEDY)
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word) and word not in stopped["content"]
    assert post(server, "/completion", prompt=PROMPT, json_schema={"const": "42"}, n_predict=12)["content"] == '"42"'
    assert post(server, "/completion", prompt=PROMPT, grammar="", n_predict=12, **GREEDY)["content"] == free
    first = post(server, "/completion", prompt=PROMPT, n_predict=1, return_tokens=True, **GREEDY)["tokens"][0]
    for biases in ([[first, False]], [[first, -100]], {str(first): -100}):
        other = post(server, "/completion", prompt=PROMPT, n_predict=1, return_tokens=True, logit_bias=biases, **GREEDY)
        assert other["tokens"] != [first]
    on = post(server, "/completion", prompt=PROMPT, n_predict=60, ignore_eos=True, **GREEDY)
    assert on["tokens_predicted"] == 60 and on["stop_type"] == "limit"
    none = post(server, "/completion", prompt=PROMPT, n_predict=0)
    assert none["content"] == "" and none["tokens_predicted"] == 0 and none["tokens_evaluated"] > 5
    fields = ["content", "generation_settings/n_predict", "nothing/there"]
    assert post(server, "/completion", prompt=PROMPT, n_predict=3, response_fields=fields).keys() == set(fields[:2])


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/completion", {}, "prompt: Field required"), ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": [1, [2]]}, "token numbers"),
        ("/completion", {"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs"),
        ("/completion", {"prompt": "a", "n_probs": 99}, "n_probs"),
        ("/completion", {"prompt": ["a"] * 65}, "at most 64"),
        ("/completion", {"prompt": "word " * 2000}, "exceeds the available context size (1024)"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "best_of": 3, "n": 2}, "best_of"),
        ("/tokenize", {}, "content: Field required"), ("/tokenize", {"content": ["a" * 600_000]}, "at most 524288"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(server, path, body, says):
    check_refused(server.client.post(path, json=body), says)


def test_a_prompt_that_is_too_long_says_by_how_much(server):
    for path, body in (("/completion", {"prompt": [5] * 2000}), ("/v1/completions", {"prompt": [5] * 2000})):
        error = server.client.post(path, json=body).json()["error"]
        assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (2000, 1024)
    for text in ("word " * 2000, "word " * 20000):  # the longer text is not tokenised to the end
        error = server.client.post("/v1/chat/completions", json={"messages": asks(text)}).json()["error"]
        assert error["n_prompt_tokens"] > error["n_ctx"] == 1024


# ------------------------------------------------------------------------------------------------------ /v1/completions


def test_the_older_completions_through_their_client(server):
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    alone = post(server, "/completion", prompt=PROMPT, n_predict=8, n_probs=2, **GREEDY)
    one = client.completions.create(model="any", prompt=PROMPT, max_tokens=8, logprobs=2, temperature=0)
    assert one.choices[0].text == alone["content"] and one.usage.prompt_tokens == alone["tokens_evaluated"]
    likely = one.choices[0].logprobs
    assert likely.token_logprobs == pytest.approx([t["logprob"] for t in alone["completion_probabilities"]], abs=1e-4)
    assert "".join(likely.tokens) == one.choices[0].text and likely.text_offset[0] == 0
    several = client.completions.create(model="any", prompt=[PROMPT, "b"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == one.choices[0].text[: len(several.choices[0].text)]
    other = client.completions.create(model="any", prompt="b", max_tokens=4, temperature=0)
    assert several.usage.prompt_tokens == one.usage.prompt_tokens + other.usage.prompt_tokens
    for _ in range(100):  # pieces that wait for a slow client are joined
        parts = list(client.completions.create(model="any", prompt=PROMPT, max_tokens=8, temperature=0, stream=True,
                                               logprobs=2, stream_options={"include_usage": True}))  # fmt: skip
        assert "".join(p.choices[0].text for p in parts if p.choices) == alone["content"]
        told = [p.choices[0].logprobs for p in parts if p.choices and p.choices[0].logprobs]
        assert [offset for one in told for offset in one.text_offset] == likely.text_offset
        assert parts[-1].usage.completion_tokens == alone["tokens_predicted"] and parts[-2].choices[0].finish_reason
        if len(told) > 1:
            break
    assert len(told) > 1


def test_chats_tell_how_long_they_took(server):
    whole = server.chat(asks("How long?")).json()
    counted = post(server, "/v1/chat/completions/input_tokens", messages=asks("How long?"))
    assert counted["input_tokens"] == whole["usage"]["prompt_tokens"]
    assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"]
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["usage"]["prompt_tokens"]
    for more in ({}, {"stream_options": {"include_usage": True}}):
        last = streamed(server, "/v1/chat/completions", messages=asks("How long?"), max_tokens=8, **more)[-1]
        assert last["timings"]["prompt_n"] + last["timings"]["cache_n"] == whole["usage"]["prompt_tokens"]


# ---------------------------------------------------------------------------------------------------- /v1/messages


@pytest.mark.parametrize("streams", [False, True])
def test_messages_name_the_stop_text_that_ended_them(server, streams):
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "Say anything."}]}

    def ended(**more):
        if not streams:
            return client.messages.create(**{**asked, **more})
        with client.messages.stream(**{**asked, **more}) as stream:
            return stream.get_final_message()

    whole = ended()
    text = whole.content[0].text
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None) and len(text) > 3
    cut = ended(stop_sequences=["nothing", text[2:4]])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", text[2:4])
    assert ended(max_tokens=1).stop_reason == "max_tokens"
