"""Second passes in a server's sequences: answers equal a session's, and no other request waits or is lost."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from choosing import whole
from scheduled_job import ScheduledJob
from server import QUESTION, SCENES, asks, cached, check_refused, serving, then

import pykvedge
from pykvedge.models.prompt import IMAGE, Message
from pykvedge.runtime.sampling import Sampling
from pykvedge.serve.job import Failed, Request, Step

AGAIN = "reading the prompt again"
SHORT = "What is at the top left?"  # kept whole: a later message keeps at least 32 tokens
LATER = f"{'Look at the image once more, at each of its places, from the top to the bottom. ' * 3}{SHORT}"
CHOICES = (
    {"method": "kvzip", "budget": 0.2},
    {"method": "kvzip-uniform", "budget": 0.3, "settings": {"scorer.chunk": 48}},
    {"method": "kvzip", "budget": 0.3, "settings": {"scorer.source": "instruction", "scorer.scope": "context"}},
)
SERVED = ("--method", "kvzip", "--budget", "0.2", "--memory", "64MiB", "--parallel", "3", "--ctx", "2048")


def a_session(model, choice, scene):
    """Returns a session's answers to two messages, and the bytes of the first prompt's kept pairs."""
    plan = pykvedge.plan(choice["method"], choice["budget"], **choice.get("settings", {}))
    with pykvedge.Session(model, plan=plan, n_ctx=2048) as session:
        first = session.ask(QUESTION, scene, Sampling(max_tokens=24)).read()
        kept = session.last_report.kv.kept_bytes
        return first, session.ask(LATER, (), Sampling(max_tokens=24)).read(), kept


def the_server(server, choice, scene):
    said = asks(QUESTION, scene)
    answer = server.chat(said, kvedge=choice).json()
    first = answer["choices"][0]["message"]["content"]
    went_on = server.chat(then(said, first, LATER), kvedge=choice).json()
    assert cached(went_on) > 100
    assert answer["kvedge"][0]["time"]["replay_s"] > 0 and went_on["kvedge"][0]["time"]["replay_s"] > 0
    return first, went_on["choices"][0]["message"]["content"], answer["kvedge"][0]["kv"]["kept_bytes"]


@pytest.mark.parametrize("choice", [CHOICES[0], CHOICES[2], *whole(CHOICES[1])], ids=str)
def test_answers_are_a_sessions_alone_and_side_by_side(server, demo_model, choice):
    told = {scene: a_session(demo_model, choice, scene) for scene in SCENES[:3]}
    assert the_server(server, choice, SCENES[0]) == told[SCENES[0]]
    with ThreadPoolExecutor(3) as pool:  # two prompts are read side by side, during another answer
        asked = [pool.submit(the_server, server, choice, scene) for scene in SCENES[1:3]]
        found = [pool.submit(once_more, server, choice, SCENES[0]), *asked]
        assert [one.result() for one in found] == list(told.values())


def test_a_later_message_that_is_kept_whole_is_read_once(server):
    said = asks(QUESTION, SCENES[0])
    first = server.text(said, kvedge=CHOICES[0])
    answer = server.chat(then(said, first, SHORT), kvedge=CHOICES[0]).json()
    assert answer["kvedge"][0]["time"]["replay_s"] == 0 < cached(answer)


def once_more(server, choice, scene):
    """Asks again, so that the prompt is cached, after an answer by a method without a second pass."""
    assert server.chat(asks("Describe the image.", scene), kvedge={"method": "h2o"}, max_tokens=64).status_code == 200
    answer = server.chat(asks(QUESTION, scene), kvedge=choice).json()
    assert answer["kvedge"][0]["time"]["replay_s"] == 0 < cached(answer)
    first = answer["choices"][0]["message"]["content"]
    said = then(asks(QUESTION, scene), first, LATER)
    return first, server.text(said, kvedge=choice), answer["kvedge"][0]["kv"]["kept_bytes"]


def test_every_listed_method_can_be_asked_for(server):
    told = server.client.get("/v1/kvedge/methods").json()
    assert told["unavailable"] == {} and {"kvzip", "kvzip-uniform"} < set(told["methods"])
    assert told["default"]["method"] == "kvzip"


def test_a_model_that_takes_nothing_back_says_so_in_the_list_and_in_a_line(environment, tiny):
    with serving(environment, "--method", "h2o", "--model", tiny("lfm2").model, "--ctx", "512") as server:
        told = server.client.get("/v1/kvedge/methods").json()
        assert "kvzip" not in told["methods"] and "recurrent layers" in told["unavailable"]["kvzip"]
        check_refused(server.chat(asks("What?"), kvedge={"method": "kvzip", "budget": 0.2}), "recurrent layers")
        assert server.chat(asks("What?"), max_tokens=2).status_code == 200


# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(scheduled):
    return scheduled(n_ctx=2048)


def request(*said, scene=SCENES[0], **settings):
    messages = [Message("user", f"{IMAGE}\n{said[0]}", [pykvedge.load_picture(scene)])]
    for i, text in enumerate(said[1:]):
        messages.append(Message("user" if i % 2 else "assistant", text))
    plan = pykvedge.plan("kvzip", 0.3, **{"scorer.chunk": 16, **settings})
    return Request(messages, plan, Sampling(max_tokens=16, temp=0.0))


def test_a_pass_tells_how_far_it_is(engine):
    asked = ScheduledJob(engine, request(QUESTION))
    asked.wait()
    shares = [event.share for event in asked.events if isinstance(event, Step) and event.what == AGAIN]
    assert len(shares) > 3 and shares == sorted(shares) and shares[-1] == 1.0 and shares[0] < 0.9


def test_who_leaves_in_the_middle_of_a_pass_loses_nothing_and_holds_up_nobody(engine):
    first = ScheduledJob(engine, request(QUESTION)).text
    undisturbed = ScheduledJob(engine, request(QUESTION, first, LATER)).text
    for cancel_at in (lambda e: isinstance(e, Step) and e.what == AGAIN,
                      lambda e: isinstance(e, Step) and e.what == AGAIN and e.share > 0.6):  # fmt: skip
        engine.park._read.clear()  # cached prompts would skip the reading
        other = ScheduledJob(engine, request("Describe the image.", scene=SCENES[1]))
        gone = ScheduledJob(engine, request(QUESTION, first, LATER + " " + LATER), cancel_at).report
        assert gone.finish == "cancelled" and gone.text == "" and other.text
        after = ScheduledJob(engine, request(QUESTION, first, LATER)).report
        assert after.text == undisturbed and after.tokens.reused > 100
    # the interrupted pass leaves nothing in its sequence: the next answer there is right
    engine.park._read.clear()
    assert ScheduledJob(engine, request(QUESTION)).text == first


def test_a_context_or_memory_without_room_for_the_pass_is_refused(scheduled, engine):
    said, sampling = [Message("user", "red and blue " * 40)], Sampling(max_tokens=2, temp=0.0)
    once, twice = (Request(said, pykvedge.plan(method, 0.3), sampling) for method in ("snapkv", "kvzip"))
    room = ScheduledJob(engine, once).report.tokens.prompt + 40
    for limits in ({"n_ctx": room}, {"n_ctx": 2048, "memory": room * engine.preparer.bytes_per_token}):
        small = scheduled(slots=1, **limits)
        failed = ScheduledJob(small, twice).wait()
        assert isinstance(failed, Failed) and "second pass over the prompt does not fit" in str(failed.error)
        assert ("--memory" in str(failed.error)) == (limits["n_ctx"] == 2048)
        assert ScheduledJob(small, once).report.finish
