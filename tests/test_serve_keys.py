"""Several users on one server: each sees and deletes only their conversations, and cannot learn what others asked."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server import ENDLESS, QUESTION, SCENES, asks, cached, serving, then

from pykvedge.errors import UsageError
from pykvedge.serve.guarding import owner_of, read_keys

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"
FILE = f"# people\n\n{ANN} ann\n  {BOB}\n"
FLAGS = ("--method", "lookm", "--budget", "0.3", "--ctx", "1024")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(FILE)
    return path


class Person:
    def __init__(self, server, key):
        self.client = httpx.Client(base_url=server.url, timeout=120, headers={"Authorization": f"Bearer {key}"})

    def ask(self, said):
        body = {"messages": said, "temperature": 0, "max_tokens": 24}
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"], cached(answer.json())

    def sessions(self):
        return self.client.get("/v1/kvedge/sessions").json()["sessions"]

    def remove(self, name):
        return self.client.delete(f"/v1/kvedge/sessions/{name}").status_code

    def event(self):
        with self.client.stream("GET", "/v1/kvedge/events") as events:
            return json.loads(next(line for line in events.iter_lines() if line.startswith("data: "))[6:])


def test_slots_tell_figures_of_the_same_key_alone(environment, file):
    long = {"prompt": "a", "grammar": ENDLESS, "n_predict": 400, "n_probs": 20}
    with serving(environment, *FLAGS, "--key-file", file) as server, ThreadPoolExecutor(1) as pool:
        ann, bob, seen = Person(server, ANN), Person(server, BOB), {}
        asked = pool.submit(ann.client.post, "/completion", json=long)
        while not asked.done():
            for name, person in (("hers", httpx.Client(headers=ann.client.headers)), ("his", bob.client)):
                busy = [one for one in person.get(f"{server.url}/slots").json() if one["is_processing"]]
                seen.setdefault(name, []).extend(busy)
    assert any("n_prompt_tokens" in one for one in seen["hers"])
    assert seen["his"] and not any(one.keys() - {"id", "n_ctx", "speculative", "is_processing"} for one in seen["his"])


def test_conversations_belong_to_a_key_also_after_a_restart(environment, file, tmp_path):
    park = tmp_path / "park"
    said = asks(QUESTION, SCENES[0])
    with serving(environment, *FLAGS, "--key-file", file, "--park", park) as server:
        ann, bob = Person(server, ANN), Person(server, BOB)
        text, cached = ann.ask(said)
        assert cached == 0
        assert ann.ask(said)[1] > 144  # her prompt is cached
        assert bob.ask(said) == (text, 0)  # not for him, although the prompt is the same
        [hers], [his] = ann.sessions(), bob.sessions()
        assert hers["id"] != his["id"]
        assert bob.remove(hers["id"]) == 404 and ann.sessions() == [hers]
        assert bob.ask(then(said, text, "And then?"))[1] > 144  # from his conversation
        memory = ann.client.get("/v1/kvedge/memory").json()
        assert memory["parked_conversations"] == 3  # of all users: numbers without names
        assert ann.event()["sessions"] == []
        assert server.end()[0] == 0
    names = {entry.name for entry in park.iterdir()}
    assert not any(ANN in name or BOB in name for name in names) and len(names) == 3
    file.write_text(f"{BOB}\nann-9876543210fedcba ann\n")  # the same name with another key
    with serving(environment, *FLAGS, "--key-file", file, "--park", park) as server:
        ann, bob = Person(server, "ann-9876543210fedcba"), Person(server, BOB)
        assert Person(server, ANN).client.get("/v1/kvedge/sessions").status_code == 401
        assert [one["id"] for one in ann.sessions()] == [hers["id"]]
        assert his["id"] in [one["id"] for one in bob.sessions()]
        assert ann.ask(then(said, text, "And then?"))[1] > 144
        assert bob.remove(hers["id"]) == 404
        assert ann.remove(hers["id"]) == 200 and bob.remove(his["id"]) == 200
        assert hers["id"] not in [one["id"] for one in ann.sessions()]
    with serving(environment, *FLAGS, "--park", park) as server:
        assert server.sessions() == []  # a server without keys does not load any


def test_answers_under_way_are_seen_and_ended_by_their_key(environment, file):
    with serving(environment, *FLAGS, "--key-file", file) as server:
        bob = Person(server, BOB)
        server.client.headers["Authorization"] = f"Bearer {ANN}"
        with server.endless(asks(QUESTION), max_tokens=900) as lines:
            other = Person(server, ANN)
            [running] = other.sessions()
            assert bob.sessions() == [] and bob.event()["sessions"] == [] and bob.event()["memory"]["running"] == 1
            assert [one["id"] for one in other.event()["sessions"]] == [running["id"]]
            assert bob.remove(running["id"]) == 404
            assert other.remove(running["id"]) == 200
            assert any('"error"' in line for line in lines)


def test_prompts_are_shared_where_that_was_asked_for(environment, file):
    said = asks(QUESTION, SCENES[0])
    with serving(environment, *FLAGS, "--key-file", file, "--share-prompts") as server:
        ann, bob = Person(server, ANN), Person(server, BOB)
        assert ann.ask(said)[1] == 0 and bob.ask(said)[1] > 144
        [hers], [his] = ann.sessions(), bob.sessions()  # but conversations are not
        assert hers["id"] != his["id"] and bob.remove(hers["id"]) == 404


def test_deleting_a_conversation_leaves_the_prompts_of_others(environment):
    with serving(environment, *FLAGS) as server:
        said, other = asks(QUESTION, SCENES[0]), asks(QUESTION, SCENES[1])
        assert cached(server.chat(said).json()) == 0
        [one] = server.sessions()
        assert cached(server.chat(other).json()) == 0
        assert server.client.delete(f"/v1/kvedge/sessions/{one['id']}").status_code == 200
        assert cached(server.chat(other).json()) > 144  # still cached
        assert cached(server.chat(said).json()) == 0  # removed with its conversation


def test_files_of_keys(file, tmp_path):
    ann, bob = read_keys(file)
    assert (ann.secret, bob.secret) == (ANN, BOB) and ann.owner != bob.owner and len(ann.owner) == 32
    assert read_keys(file) == (ann, bob)
    keys = (ann, bob)
    assert owner_of(ANN, keys) == ann.owner and owner_of(BOB, keys) == bob.owner
    for wrong in ("", ANN[:-1], ANN + "x", f"{ANN} ann", "é" * 16):
        assert owner_of(wrong, keys) is None
    path = tmp_path / "other"
    for text, why in (("", "1 to"), ("# none\n", "1 to"), ("short", "line 1.*16 to 1024"), (f"\n{ANN} a b", "line 2"),
                      (f"{ANN}\n{ANN}", "line 2.*occurs twice"), (f"{ANN} a\n{BOB} a", "line 2.*occurs twice"),
                      (f"{ANN} a/b", "name"), ("é" * 20, "printable ASCII"), ("a" * 1025, "1024")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(UsageError, match=why):
            read_keys(path)
    path.write_text(ANN)  # a single key without a name
    assert [key.secret for key in read_keys(path)] == [ANN]
