"""A server with drafts gives the same answers as without drafts, to one client and to several."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from drafted import AGAIN, SAMPLINGS, SCENE, ask
from server import serving

import pykvedge
from pykvedge import Message, Sampling, UnsupportedError, load_picture
from pykvedge.runtime import drafting
from pykvedge.serve.completions import usage
from pykvedge.serve.job import Limits
from pykvedge.serve.parked import Park
from pykvedge.serve.scheduler import Scheduler


@pytest.fixture
def schedulers(scheduled):
    """Two schedulers: without and with drafts."""
    return [scheduled(n_ctx=4096, memory=256 << 20, slots=3, lookup=on) for on in (False, True)]


@pytest.fixture
def many(monkeypatch):
    """Drafts as many tokens as fit, at any cost."""
    monkeypatch.setattr(drafting.Drafter, "_best", lambda self, kind, most, each=0: (most, 1.0))


def first():
    return [Message("user", AGAIN, [load_picture(SCENE)])]


@pytest.mark.parametrize("sampling", ["greedy", "grammar", "stop", "logprobs", "sampled", "penalties"])
def test_answers_are_alike(schedulers, many, sampling):
    plain, drafted = (ask(one, first(), SAMPLINGS[sampling]) for one in schedulers)
    assert drafted[1:] == plain[1:] and drafted[0].text == plain[0].text and drafted[0].finish == plain[0].finish
    assert len(drafted[0].logprobs or []) == len(plain[0].logprobs or [])
    assert plain[0].drafts is None and drafted[0].drafts.verifications > 0
    assert drafted[0].time.decode_steps == plain[0].time.decode_steps


def test_a_conversation_goes_on(schedulers, many):
    said = []
    for scheduler in schedulers:
        messages, answers = first(), []
        for question in ("What is the code?", "Describe it again.", "And again."):
            report, _, _ = ask(scheduler, messages, Sampling(max_tokens=40))
            answers.append((report.text, report.tokens.reused))
            messages = [*messages, Message("assistant", report.text), Message("user", question)]
        said.append(answers)
    assert said[0] == said[1] and said[0][-1][1] > 0


def test_several_at_once(schedulers, many):
    """Answers are drafted while a request is alone, and go on in common batches."""
    prompts = [f"{AGAIN} ({i})" for i in range(5)]
    expected = [ask(schedulers[0], [Message("user", text)], SAMPLINGS["greedy"])[1] for text in prompts]
    with ThreadPoolExecutor(5) as pool:
        found = pool.map(lambda text: ask(schedulers[1], [Message("user", text)], SAMPLINGS["greedy"])[1], prompts)
        assert list(found) == expected


def test_what_cannot_be_drafted_is_answered_without(schedulers, many):
    plan = pykvedge.plan("h2o", 0.3, decode="heavy-hitter")
    plain, drafted = (ask(one, first(), SAMPLINGS["greedy"], plan) for one in schedulers)
    assert drafted[1] == plain[1] and drafted[0].drafts.drafted == 0


def test_usage_counts_guesses(schedulers, many):
    plain, drafted = (ask(one, first(), SAMPLINGS["greedy"])[0] for one in schedulers)
    assert set(usage([plain])["completion_tokens_details"]) == {"reasoning_tokens"}
    counts = usage([drafted, drafted])["completion_tokens_details"]
    right = 2 * drafted.drafts.accepted
    assert counts["accepted_prediction_tokens"] == right > 0
    assert counts["rejected_prediction_tokens"] == 2 * drafted.drafts.drafted - right


def test_recurrent_layers_are_refused(tiny, native):
    with pykvedge.load(tiny("lfm2").model, threads=1) as model, pytest.raises(UnsupportedError, match="recurrent"):
        Scheduler(model, Limits(lookup=True), Park(None))


def test_the_option(environment):
    with serving(environment, "--lookup", "--quiet") as server:
        answer = server.chat([{"role": "user", "content": AGAIN}], max_tokens=60).json()
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] >= 0 and answer["choices"][0]["message"]["content"]
