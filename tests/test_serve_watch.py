"""Live information of `kvedge serve`: progress, kept patches, conversations, and events."""

import json
import threading

import numpy as np
import pytest
from server import DEMO, QUESTION, SCENES, asks, cached, serving, then
from waits import until

import pykvedge
from pykvedge import Sampling
from pykvedge.serve.job import Job, Request
from pykvedge.serve.scheduler import Counts

PLAN = ("--method", "lookm", "--budget", "0.3")
SERVED = (*PLAN, "--memory", "64MiB", "--parallel", "2", "--ctx", "2048")


def chunks(server, messages, **fields):
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **fields}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


@pytest.mark.parametrize("image_tokens", [1.0, 0.5])
def test_patches_are_the_tokens_that_a_session_keeps(server, native, image_tokens):
    choice = {"patches": True, "image_tokens": image_tokens}
    told = server.chat(asks(QUESTION, *SCENES[:2]), kvedge=choice).json()["kvedge"][0]["patches"]
    plan = pykvedge.plan("lookm", 0.3, image_tokens=image_tokens)
    with pykvedge.Session(DEMO / "demo-model.gguf", DEMO / "demo-mmproj.gguf", plan, threads=1) as session:
        kept = session.examine(f"<image>\n<image>\n{QUESTION}", list(map(pykvedge.load_picture, SCENES[:2])), plan)
    assert len(told["layers"]) == len(kept) and len(told["images"]) == 2
    for image in told["images"]:
        assert image["rows"] * image["columns"] == 144 == len(image["share"][0]) and image["padded"]
    for i, layer in enumerate(kept):
        # the pictures' places among the tokens are found as runs of the same shares
        n_tokens = max(max(head, default=0) for head in layer) + 1
        share = np.zeros(n_tokens)
        for head in layer:
            share[head] += 100 / len(layer)
        shown = [np.array(image["share"][i]) for image in told["images"]]
        runs = np.lib.stride_tricks.sliding_window_view(np.rint(share), round(144 * image_tokens))
        positive = [list(run[run > 0]) for run in runs]
        assert all(list(one[one > 0]) in positive for one in shown)


def test_a_compression_is_counted_where_something_goes(server):
    for kept, more in (({"method": "full"}, 0), ({"budget": 2000}, 0), ({"budget": 0.3}, 1)):
        before = server.metric("compressions_total")
        server.chat(asks(f"{QUESTION} {kept}", SCENES[0]), kvedge=kept, max_tokens=1)
        assert server.metric("compressions_total") == before + more


def test_a_prompt_that_was_given_up_was_not_read():
    job, counts = Job(Request([], pykvedge.plan("full"), Sampling()), print), Counts()
    job.report.tokens.prompt = 500
    counts.ended("cancelled", job)
    assert counts.finished["cancelled"] == 1 and counts.sums["prompt_tokens"] == 0
    job.report.time.prefill_s = 0.1
    counts.ended("end", job)
    assert counts.sums["prompt_tokens"] == 500


def test_no_patches_where_nobody_asked(server):
    assert "patches" not in server.chat(asks(QUESTION, SCENES[0])).json()["kvedge"][0]


def test_a_stream_with_progress_tells_how_far_the_prompt_is(server):
    said = asks(QUESTION, SCENES[3])
    given = chunks(server, said, temperature=0, kvedge={"progress": True})
    steps = [c["kvedge"]["progress"] for c in given if "kvedge" in c and not c.get("usage")]
    assert steps[0]["what"] == "encoding image 1 of 1"
    assert steps[-1] == {"what": "reading the prompt", "share": 1}
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in given if c["choices"])
    assert text == server.text(said)
    plain = chunks(server, said, temperature=0)
    assert not [c for c in plain if "kvedge" in c and not c.get("usage")]


def test_an_error_in_a_stream_with_progress_is_its_last_chunk(server):
    last = chunks(server, asks("word " * 480), kvedge={"progress": True})[-1]
    assert last["error"]["code"] == "context_length_exceeded"


def test_conversations_are_listed_and_forgotten(environment):
    with serving(environment, *PLAN, "--ctx", "1024") as server:
        assert server.sessions() == []
        said = asks(QUESTION, SCENES[0])
        said = then(said, server.text(said), "What is the code?")
        [parked] = server.sessions()
        assert parked["state"] == "parked" and parked["where"] == "memory" and parked["tokens"] > 144
        assert QUESTION not in json.dumps(parked)
        gone = server.client.delete(f"/v1/kvedge/sessions/{parked['id']}").json()
        assert gone == {"id": parked["id"], "forgotten": True}
        assert server.sessions() == [] and server.memory()["parked_bytes"] == 0
        assert cached(server.chat(said).json()) == 0  # read again, as nothing was cached
        for name in (parked["id"], "x", "%2e%2e", "a" * 200):
            gone = server.client.delete(f"/v1/kvedge/sessions/{name}")
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "not_found"


def test_conversations_in_the_folder_are_listed_and_forgotten(environment, tmp_path):
    with serving(environment, *PLAN, "--ctx", "1024", "--park", tmp_path) as server:
        server.text(asks(QUESTION, SCENES[0]))
        assert server.end()[0] == 0
    with serving(environment, *PLAN, "--ctx", "1024", "--park", tmp_path) as server:
        [parked] = server.sessions()
        assert parked["where"] == "folder" and parked["bytes"] > 10000
        assert server.client.delete(f"/v1/kvedge/sessions/{parked['id']}").status_code == 200
        assert not list(tmp_path.glob("*.kvc"))


def test_events_show_an_answer_that_is_ended_from_outside(server):
    seen, began = [], threading.Event()

    def watch():
        with server.client.stream("GET", "/v1/kvedge/events") as events:
            for line in events.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                    began.set()
                if len(seen) > 2 and seen[-1]["memory"]["running"] == 0:
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert began.wait(60) and seen[0]["memory"]["running"] == 0 and seen[0]["memory"]["private_bytes"] > 1 << 20
    with server.endless(asks(QUESTION), max_tokens=1900) as lines:
        [running] = [one for one in server.sessions() if one["state"] == "answering"]
        until(lambda: any(s["state"] == "answering" and s["bytes"] for s in seen[-1]["sessions"]))
        assert running["bytes"] > 0 and running["generated"] > 0 and running["method"] == "lookm"
        assert server.client.delete(f"/v1/kvedge/sessions/{running['id']}").json()["ended"]
        assert any('"error"' in line for line in lines)  # the client is told
    watcher.join(60)
    assert not watcher.is_alive()


def test_a_server_that_goes_down_ends_its_events(environment):
    with (
        serving(environment, *PLAN, "--ctx", "1024") as server,
        server.client.stream("GET", "/v1/kvedge/events") as events,
    ):
        lines = events.iter_lines()
        next(lines)
        server.process.terminate()
        assert not [line for line in lines if line and not line.startswith((":", "data: "))]
        assert server.process.wait(60) == 0
