"""What the tests of drafted answers share: questions, samplings, and the parts of an answer."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from scheduled_job import ScheduledJob

import pykvedge
from pykvedge import Sampling
from pykvedge.runtime import drafting
from pykvedge.runtime.report import Drafts
from pykvedge.serve.job import Request

SCENE = "examples/scene-1.png"
AGAIN = "Describe the image. A red triangle at the top left, a pink circle at the bottom left, a red"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}, "c": {"type": "boolean"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
SAMPLINGS = {
    "greedy": Sampling(max_tokens=70),
    "short": Sampling(max_tokens=5),
    "penalties": Sampling(max_tokens=60, repeat_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2),
    "bias": Sampling(max_tokens=60, logit_bias={" red": -3.0, 7: 1.5}),
    "grammar": Sampling(max_tokens=60, json_schema=SCHEMA),
    "stop": Sampling(max_tokens=60, stop=["triangle at the b", "code 9"]),
    "logprobs": Sampling(max_tokens=40, logprobs=3),
    "sampled": Sampling(max_tokens=60, temp=1.2, seed=11, top_p=0.9),
    "sampled form": Sampling(max_tokens=60, temp=0.7, seed=4, json_schema=SCHEMA, repeat_penalty=1.2),
}
PLANS = {"full": ("full", None), "snapkv": ("snapkv", 0.3), "lookm": ("lookm", 0.2)}


@contextmanager
def open_sessions(plans, folder=""):
    """Yields make(plan, **settings) -> a session with the packaged model. The same settings give the same session.

    plans: name -> (method, budget) or (method, budget, settings). folder: for whole rows on disk.
    """
    made = {}

    def make(name, **settings):
        key = (name, *sorted(settings.items()))
        if key not in made:
            method, budget, *more = plans[name]
            where = {"keep_folder": folder} if settings.get("keep") == "disk" else {}
            plan = pykvedge.plan(method, budget, **(more[0] if more else {}))
            made[key] = pykvedge.Session(plan=plan, threads=1, **settings, **where)
        return made[key]

    yield make
    for session in made.values():
        session.close()


def draft_much(monkeypatch):
    """Drafts as many tokens as fit, at any cost. Returns use(right): sets how many first draft tokens are right."""
    draft = drafting.Drafter._draft
    monkeypatch.setattr(drafting.Drafter, "_ahead", lambda self, n, chance, tokens, most, rate, each: (most, 1.0))

    def use(right):
        def drafted(self, generation, most):
            guesses, kinds = draft(self, generation, most)
            return wrong_behind(guesses, right), kinds

        monkeypatch.setattr(drafting.Drafter, "_draft", drafted)

    return use


def wrong_behind(guesses, right):
    return [t if i < right else (t + 7) % 250 + 1 for i, t in enumerate(guesses)]


@dataclass
class AnswerRecord:
    """The parts of an answer. ids: all tokens, with the end token. later: the answer to a second question."""

    ids: list[int]
    text: str
    finish: str
    pending: list[int]
    logprobs: list
    later: str
    drafts: Drafts | None


def record_answer(session, sampling, images=(SCENE,)):
    session.clear()
    answer = session.ask(AGAIN, images, sampling)
    answer.read()
    generation, report, pending = answer._generation, answer.report, session.pending
    ids = [*generation.tokens, *([generation.token] if report.finish == "end" else [])]
    later = session.ask("And now?", sampling=Sampling(max_tokens=12)).read()
    return AnswerRecord(ids, report.text, report.finish, pending, report.logprobs or [], later, report.drafts)


def check_alike(drafted, plain):
    for name in ("ids", "text", "finish", "pending", "later"):
        assert getattr(drafted, name) == getattr(plain, name), name
    assert len(drafted.logprobs) == len(plain.logprobs)
    for one, other in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert one.id == other.id and one.top[0].id == other.top[0].id
        of = [[t.logprob for t in (token, *token.top)] for token in (one, other)]
        np.testing.assert_allclose(*of, rtol=1e-3, atol=2e-3)


def broken_off(session, enough):
    """Breaks off an answer after `enough` tokens. Returns its tokens, text, pending tokens, and the next answer."""
    session.clear()
    answer = session.ask(AGAIN, [SCENE], SAMPLINGS["greedy"])
    for _ in answer:
        if answer.report.tokens.generated >= enough:
            break
    answer.close()
    so_far, pending = answer._generation.tokens, session.pending
    return so_far, answer.report.text, pending, session.ask("Why?", sampling=Sampling(max_tokens=12)).read()


def ask(scheduler, messages, sampling, plan=None):
    """Returns the report of a server's answer, its tokens, and the streamed text."""
    asked = ScheduledJob(scheduler, Request(messages, plan or pykvedge.plan("snapkv", 0.3), sampling))
    return asked.report, asked.job.ids, "".join(asked.pieces)
