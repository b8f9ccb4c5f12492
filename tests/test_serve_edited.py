"""A request that omits pictures of a known conversation goes on from its rows, and nothing is read again."""

import random

import pytest
from server import DEMO, SCENES, asks, check_refused, serving

import pykvedge
from pykvedge.serve import edited as known_again
from pykvedge.serve.edited import KnownConversations, dropped, outline

EDITED = {"edited": "demote"}
QUESTIONS = [
    "What is the code?", "What is the code in image 2?", "How many triangles are there?",
    "What is the code in image 1?", "What color is the circle in image 2?",
]  # fmt: skip
SNAPKV = ("--method", "snapkv", "--budget", "0.3")
SERVED = (*SNAPKV, "--keep", "ram", "--quiet")


def say(server, messages, question=None, *pictures, **kvedge):
    """Asks a question, if given, and adds the answer to the messages. Returns the answer's body."""
    if question is not None:
        messages += asks(question, *pictures) if pictures else [{"role": "user", "content": question}]
    answer = server.chat(messages, max_tokens=12, **({"kvedge": kvedge} if kvedge else {}))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
    return body


def read(body):
    """Returns (tokens read for an answer, cached tokens, demoted pictures)."""
    details = body["usage"]["prompt_tokens_details"]
    assert body["timings"]["prompt_n"] + details["cached_tokens"] == body["usage"]["prompt_tokens"]
    return body["timings"]["prompt_n"], details["cached_tokens"], details.get("demoted_images")


def of_session(forgotten):
    """Returns the answers to the five questions. Image n is forgotten before question i for n in forgotten[i]."""
    texts, files = [], (DEMO / "demo-model.gguf", DEMO / "demo-mmproj.gguf")
    greedy = pykvedge.Sampling(max_tokens=12, temp=0.0)
    with pykvedge.Session(*files, pykvedge.plan("snapkv", 0.3), threads=1, keep="ram") as session:
        for i, question in enumerate(QUESTIONS):
            for image in forgotten.get(i, ()):
                session.forget_image(image)
            shown = [SCENES[i]] if i < 2 else []
            texts.append(session.ask(("<image>\n" if shown else "") + question, shown, greedy).read().strip())
    return texts


def test_nothing_is_read_twice(server):
    """A picture is omitted before the third question, and another is replaced by text before the fifth."""
    messages, counts = [], []
    for i, question in enumerate(QUESTIONS):
        if i == 2:
            messages[0]["content"] = QUESTIONS[0]
        if i == 4:
            parts = messages[2]["content"]
            parts[0] = {"type": "text", "text": "(screenshot left out:\na scene)"}
        counts.append(read(say(server, messages, question, *([SCENES[i]] if i < 2 else []), **EDITED)))
    texts = [message["content"].strip() for message in messages[1::2]]
    assert texts == of_session({2: [1], 4: [2]}) != of_session({})
    assert [demoted for *_, demoted in counts] == [0, 0, 1, 1, 2]
    assert read(say(server, messages[:-1], **EDITED))[2] == 2  # the same request again
    (first, nothing, _), *later = counts
    assert first > 144 and nothing == 0
    for (_, there, _), (before, held, _) in zip(later, counts, strict=False):
        assert there >= before + held  # and the answer, except its last token
    assert later[0][0] > 144 > 40 > max(new for new, *_ in later[1:])


def test_tokens_of_an_answer_that_is_read_again_are_the_prompts(server):
    messages = []
    for i, question in enumerate(QUESTIONS[:3]):
        messages += asks(question, *SCENES[i : i + 1]) if i < 2 else [{"role": "user", "content": question}]
        counted = server.client.post("/v1/chat/completions/input_tokens", json={"messages": messages}).json()
        usage = say(server, messages)["usage"]
        assert usage["prompt_tokens"] == counted["input_tokens"]
        assert i == 0 or usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_without_the_field_all_is_read(server):
    messages = []
    say(server, messages, QUESTIONS[0], SCENES[2])
    messages[0]["content"] = QUESTIONS[0]
    new, there, demoted = read(say(server, list(messages), "And now?"))
    assert there == 0 and new < 144 and demoted is None
    demoting = [*messages, {"role": "user", "content": "And now?"}]
    again = read(say(server, demoting, **EDITED))  # the prompt was read meanwhile, without the picture
    assert again[0] == 0 and again[2] == 0
    demoting = list(messages)
    assert read(say(server, demoting, "Why?", **EDITED))[2] == 1
    assert read(say(server, demoting, "Who?"))[1] == 0  # a request must ask for demotion to use such rows


def refused(server, messages, *words, status=409, **fields):
    check_refused(server.chat(messages, max_tokens=2, **{"kvedge": EDITED, **fields}), *words, status=status)


def test_what_cannot_be_is_refused(server, environment):
    messages = []
    say(server, messages, QUESTIONS[0], SCENES[3])
    more = {"role": "user", "content": "And now?"}
    changed = [{"role": "user", "content": "What is the color?"}, messages[1], more]
    refused(server, changed, "has no conversation with the same texts", "omit kvedge.edited")
    refused(
        server, [*asks(QUESTIONS[0], SCENES[1]), messages[1], more], "has no conversation with the same texts"
    )  # another picture
    refused(
        server, [messages[0], {"role": "assistant", "content": "no"}, more], "has no conversation with the same texts"
    )
    refused(server, [*messages, more], "edited", status=400, kvedge={"edited": "forget"})
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tools = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "red"}]
    refused(server, [*messages, more, *tools], "the last three messages must be")
    kvzip = {"method": "kvzip", "budget": 0.5}
    twice = []
    say(server, twice, QUESTIONS[0], SCENES[3], **kvzip)
    twice[0]["content"] = QUESTIONS[0]
    refused(server, [*twice, more], "uncompressed KV rows", kvedge={**kvzip, **EDITED})
    prompt = {"prompt": "Hello", "n_predict": 2, "kvedge": EDITED}
    assert server.client.post("/completion", json=prompt).status_code == 400
    for options, words in ((("--keep", "ram", "--exact"), "exact"), ((), "--keep ram or --keep disk")):
        with serving(environment, *SNAPKV, "--quiet", *options) as other:
            refused(other, [*messages, more], words, status=400)


def test_another_key_knows_nothing(environment, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("3f9c0e5d1b7a4c62 ann\na81d7c93e2f04b56 bob\n")
    with serving(environment, *SNAPKV, "--keep", "ram", "--quiet", "--key-file", keys) as server:
        messages = []
        server.client.headers["Authorization"] = "Bearer 3f9c0e5d1b7a4c62"
        say(server, messages, QUESTIONS[0], SCENES[0])
        messages[0]["content"] = QUESTIONS[0]
        messages.append({"role": "user", "content": "And now?"})
        server.client.headers["Authorization"] = "Bearer a81d7c93e2f04b56"
        refused(server, messages, "has no conversation with the same texts")
        server.client.headers["Authorization"] = "Bearer 3f9c0e5d1b7a4c62"
        assert read(say(server, messages, **EDITED))[2] == 1


# ------------------------------------------------------------------------------------------------------------

IMG = "<image>"


@pytest.mark.parametrize(("known", "edited", "expected"), [
    ((f"{IMG}\nWhat?", "a"), ("What?", ""), [True]),
    ((f"{IMG}\nWhat?", "a"), ("gone\nWhat?", ""), [True]),
    ((f"{IMG}\nWhat?", "a"), (f"{IMG}\nWhat?", "a"), [False]),
    ((f"{IMG}\nWhat?", "a"), (f"{IMG}\nWhat?", "b"), None),
    ((f"{IMG}\nWhat?", "a"), ("Who?", ""), None),
    ((f"{IMG}\nWhat?", "a"), ("What?\nmore", ""), None),
    ((f"one\n{IMG}\n{IMG}\ntwo", "aa"), (f"one\n{IMG}\ntwo", "a"), [False, True]),
    ((f"one\n{IMG}\nmid\n{IMG}\ntwo", "ab"), (f"one\nmid\n{IMG}\ntwo", "b"), [True, False]),
    ((f"one\n{IMG}\nmid\n{IMG}\ntwo", "ab"), ("one\ngone\nmid\nmid\ntwo", ""), [True, True]),
    ((f"Page 1: {IMG}\nPage 2: {IMG}\nWhat?", "ab"), (f"Page 2: {IMG}\nWhat?", "b"), [True, False]),
    (("What?", "ab"), ("What?", "b"), [True, False]),
    (("no picture", ""), ("no picture", ""), []),
    ((f"\\{IMG}\n{IMG}\nWhat?", "a"), (f"\\{IMG}\nWhat?", ""), [True]),
    ((f"\\{IMG}\n{IMG}\nWhat?", "a"), ("What?", ""), None),
    ((f"{IMG}\nWhat?", "a"), ("\n".join("x" * 65) + "\nWhat?", ""), None),
])  # fmt: skip
def test_what_was_dropped(known, edited, expected):
    assert dropped(outline(known[0], list(known[1])), outline(edited[0], list(edited[1]))) == expected


def test_edits_are_found_whatever_they_are():
    rng = random.Random(1)
    for _ in range(2000):
        known = [rng.choice((*"ab", *"PQ")) for _ in range(rng.randint(0, 9))]  # lines and pictures
        edited, gone = [], []
        for one in known:
            if one in "ab":
                edited.append(one)
                continue
            gone.append(rng.random() < 0.6)
            edited += [one] if not gone[-1] else rng.choices("abc", k=rng.randint(0, 2))

        def made(parts):
            return outline("\n".join(IMG if part in "PQ" else part for part in parts), [p for p in parts if p in "PQ"])

        found = dropped(made(known), made(edited))
        assert found is not None and sum(found) == sum(gone)  # the numbers of pictures agree
        if rng.random() < 0.5 and edited:
            assert dropped(made(known), made([*edited[:-1], "d"])) is None or known[-1] in "PQ"


def test_the_oldest_conversation_is_forgotten_where_there_are_too_many_lines(monkeypatch):
    monkeypatch.setattr(known_again, "_MOST", 10)
    known, later = KnownConversations(), [("user", "a\nb\nd", {}, [])]
    for name in ("first", "second", "first", "third"):
        known.add(name, [], [("user", "a\nb\n<image>\nd", {}, ["P"])])  # 4 lines each
    assert [name for name, _ in known.find([], later)] == ["third", "first"]
