"""A server with --exact gives the full cache's answers with every plan, to several conversations side by side."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from choosing import whole
from drafted import AGAIN, SAMPLINGS, SCENE, ask, draft_much
from scheduled_job import ScheduledJob
from server import asks, serving

import pykvedge
from pykvedge import Keep, Message, Sampling, UnsupportedError, UsageError, load_picture
from pykvedge.caches.folder import CacheFolder
from pykvedge.serve.job import Limits, Request
from pykvedge.serve.parked import Park
from pykvedge.serve.scheduler import Scheduler

LIMITS = Limits(slots=4, n_ctx=4096, memory=256 << 20, keep=Keep("ram"))
PLANS = [("snapkv", 0.1), ("lookm", 0.2), ("streaming-llm", 0.05), ("adakv", 0.5)]
SECOND = Sampling(max_tokens=20)


@pytest.fixture(scope="module")
def schedulers(demo_model, tmp_path_factory):
    """Two schedulers: with compressed rows only; and exact, with whole rows in a file and parked ones in a folder."""
    exact = replace(LIMITS, exact=True, keep=Keep("disk", tmp_path_factory.mktemp("rows")))
    park = Park(CacheFolder(tmp_path_factory.mktemp("park"), 1 << 30))
    made = [Scheduler(demo_model, LIMITS, Park(None)), Scheduler(demo_model, exact, park)]
    yield made
    for one in made:
        one.close()


@pytest.fixture(params=["as it is", "many"])
def drafts(request, monkeypatch):
    """"as it is": drafts where they pay. "many": as many drafts as fit; only the first two are right."""
    if request.param == "many":
        draft_much(monkeypatch)(2)
    return request.param


def conversation(scheduler, plan, sampling, number):
    """Asks two questions, the first about a picture. Returns (tokens, text, finish, logprob ids, reused) of each."""
    messages, out = [Message("user", f"({number}) {AGAIN}", [load_picture(SCENE)])], []
    for chosen in (sampling, SECOND):
        report, ids, text = ask(scheduler, messages, chosen, pykvedge.plan(*plan))
        assert report.text == text and not report.notes, report.notes
        if plan[0] != "full":
            assert report.drafts is None or (report.drafts.exact and report.drafts.verifications > 0)
        out.append(
            (ids, text, report.finish, [token.id for token in report.logprobs or []], report.tokens.reused > 100)
        )
        messages = [*messages, Message("assistant", report.text), Message("user", "What is the code?")]
    assert [reused for *_, reused in out] == [False, True]
    return out


def side_by_side(scheduler, work):
    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(lambda one: conversation(scheduler, *one), work))


@pytest.mark.parametrize(
    "samplings", ["greedy, grammar, stop, sampled", *whole("sampled form, penalties, logprobs, bias")]
)
def test_answers_are_those_of_the_whole_cache(schedulers, drafts, samplings):
    for scheduler in schedulers:
        scheduler.park.shrink(0)
    chosen = [SAMPLINGS[name] for name in samplings.split(", ")]
    work = [(plan, sampling, i) for i, (plan, sampling) in enumerate(zip(PLANS, chosen, strict=True))]
    full = [conversation(schedulers[0], ("full", None), *rest) for _, *rest in work]
    assert side_by_side(schedulers[1], work) == full
    if drafts == "as it is":
        assert side_by_side(schedulers[0], work) != full  # otherwise this test could not fail


def test_a_conversation_without_whole_rows_is_read_again(scheduled):
    """A method that reads its prompt twice leaves no whole rows for later requests; nor does a too small limit."""
    limits = {"n_ctx": 4096, "memory": 256 << 20, "exact": True}
    scheduler, small = (scheduled(keep=keep, **limits) for keep in (Keep("ram"), Keep("ram", space=1000)))
    messages, plan = [Message("user", AGAIN, [load_picture(SCENE)])], ("kvzip", 0.3)
    expected = ask(scheduler, messages, SECOND, pykvedge.plan("full"))[1]
    for _ in range(2):
        report, ids, _ = ask(scheduler, messages, SECOND, pykvedge.plan(*plan))
        assert ids == expected and report.drafts.exact and report.tokens.reused == 0
    report, _, _ = ask(small, messages, SECOND, pykvedge.plan("snapkv", 0.1))
    assert report.drafts.exact is False and "--keep has no effect on this conversation" in report.notes[0]
    assert not small.park._held and not small.park._read


def test_what_a_job_needs_is_never_exceeded(schedulers, drafts):
    scheduler, seen = schedulers[1], []
    decoder, measure = scheduler._decoder, scheduler._decoder._measure

    def noting(slots):
        measure(slots)
        seen.extend((slot.n_bytes, slot.work.need) for slot in slots)

    decoder._measure = noting
    try:
        said = [Message("user", AGAIN, [load_picture(SCENE)])]
        ask(scheduler, said, Sampling(max_tokens=200), pykvedge.plan("lookm", 0.2))
    finally:
        decoder._measure = measure
    block = 2 * 32 * scheduler.preparer.bytes_per_token  # rows of an answer come in blocks
    assert seen and all(n_bytes <= need + block for n_bytes, need in seen)


def test_what_cannot_be_exact_is_refused(tiny, kvedge, schedulers):
    with pykvedge.load(tiny("lfm2").model, threads=1) as model, pytest.raises(UnsupportedError, match="recurrent"):
        Scheduler(model, replace(LIMITS, exact=True), Park(None))
    plan = pykvedge.plan("h2o", 0.3, decode="heavy-hitter")
    end = ScheduledJob(schedulers[1], Request([Message("user", AGAIN)], plan, SECOND)).wait()
    assert isinstance(end.error, UsageError) and "omit --exact" in str(end.error)
    kvedge("serve", "--exact").failed(2, "--exact", "--keep")
    kvedge("serve", "--exact", "--keep", "ram", "--decode", "sliding").failed(2, "decode policy 'sliding'")


def test_over_http(environment):
    options = ("--keep", "ram", "--exact", "--method", "snapkv", "--budget", "0.1", "--quiet")
    with serving(environment, *options) as server:
        bodies = [
            server.chat(asks(AGAIN, SCENE), max_tokens=40, **more).json()
            for more in ({"kvedge": {"method": "full"}}, {})
        ]
        full, exact = (body["choices"][0]["message"]["content"] for body in bodies)
        assert exact == full
        drafts, details = bodies[1]["kvedge"][0]["drafts"], bodies[1]["usage"]["completion_tokens_details"]
        assert drafts["exact"] is True and drafts["verifications"] > 0
        assert drafts["accepted"] == details["accepted_prediction_tokens"]
