"""Exact answers are drafted with compressed rows and verified over whole rows: they equal the full cache's answers."""

import functools

import numpy as np
import pytest
from choosing import whole
from drafted import AGAIN, SAMPLINGS, SCENE, broken_off, check_alike, draft_much, open_sessions, record_answer

import pykvedge
from kvedge_lab.eval.tasks import demo_samples
from pykvedge import Sampling, UnsupportedError, UsageError
from pykvedge.runtime import drafting

PLANS = {
    "snapkv": ("snapkv", 0.1),
    "lookm": ("lookm", 0.2),
    "streaming-llm": ("streaming-llm", 0.05),
    "ragged": ("snapkv", 0.3, {"allocator": "ada", "reducer": "weighted"}),
    "biased": ("lookm", 0.25, {"reducer": "averaged", "reducer.bias": "mass"}),
}
QUESTIONS = (AGAIN, "What is the code?", "Describe the image once more.")


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    with open_sessions({**PLANS, "full": ("full", None)}, str(tmp_path_factory.mktemp("rows"))) as make:
        yield make


@pytest.fixture
def drafting_much(monkeypatch):
    return draft_much(monkeypatch)


CASES = [
    *[("snapkv", name, (99, 0, 2) if name == "greedy" else (2,)) for name in SAMPLINGS],
    *[(name, "greedy", (2,)) for name in PLANS if name != "snapkv"],
    *whole(*[(name, "greedy", (99, 0)) for name in PLANS if name != "snapkv"]),
    *whole(*[(plan, name, (2,)) for plan in PLANS for name in SAMPLINGS if plan != "snapkv" and name != "greedy"]),
]


@pytest.fixture(scope="module")
def of_full(sessions):
    """of_full(sampling) -> the answer of the full cache. Each is computed once."""
    return functools.cache(lambda sampling: record_answer(sessions("full"), SAMPLINGS[sampling]))


@pytest.mark.parametrize("method", ["h2o", *whole("meda", "lookm", "roco", "snapkv", "flashcache")])
def test_a_prompt_is_read_alike_whatever_a_plan_observes(sessions, native, method):
    """Bit for bit: with 8-bit weights, the last bit of a sum can change a logit by a tenth."""
    asked = [one for n, task in ((1, "code"), (4, "which-image")) for one in demo_samples(task, 2, 3, n)]

    def first_logits(session, sample):
        message = sample.messages()[-1]
        session.clear()
        session.ask(message.text, message.pictures, Sampling(max_tokens=1)).close()
        return np.array(session.engine.context.logits())

    full = [first_logits(sessions("full"), sample) for sample in asked]
    with pykvedge.Session(plan=pykvedge.plan(method, 0.2), threads=1) as session:
        for sample, expected in zip(asked, full, strict=True):
            np.testing.assert_array_equal(first_logits(session, sample), expected)


@pytest.mark.parametrize("plan, sampling, drafted_right", CASES)
def test_the_answer_is_that_of_the_whole_cache(sessions, of_full, drafting_much, native, plan, sampling, drafted_right):
    chosen, full = SAMPLINGS[sampling], of_full(sampling)
    session = sessions(plan, keep="ram", exact=True)
    for right in drafted_right:
        drafting_much(right)
        exact = record_answer(session, chosen)
        check_alike(exact, full)
        counts = exact.drafts
        assert counts.exact and counts.verifications > 0 and counts.drafted >= counts.verifications - 1
        assert counts.accepted <= right * counts.verifications + 3  # a wrong guess may be right by chance


def test_drafts_of_the_compressed_rows_are_often_right(sessions, drafting_much, native):
    exact = record_answer(sessions("lookm", keep="ram", exact=True), SAMPLINGS["greedy"])
    assert exact.drafts.accepted > 0


def test_the_report_counts_what_was_read(sessions, drafting_much, native):
    session = sessions("snapkv", keep="ram", exact=True)
    session.clear()
    answer = session.ask(AGAIN, [SCENE], Sampling(max_tokens=30))
    kept, whole_rows = answer.report.kv.kept_bytes, answer.report.kv.full_bytes
    answer.read()
    drafts = answer.report.as_json()["drafts"]
    stats = session.engine.cache.stats()
    least = drafts["drafted"] * kept + drafts["verifications"] * whole_rows
    most = drafts["drafted"] * stats.bytes + drafts["verifications"] * stats.whole_bytes
    assert least < drafts["read_bytes"] < most < 3 * least
    assert "read_bytes" not in sessions("snapkv", lookup=True).ask(AGAIN, [SCENE]).report.as_json()["drafts"]


def test_as_it_is(sessions, of_full, native):
    """Normal drafts; with whole rows in a file; with a lookup as well."""
    full = of_full("greedy")
    for settings in ({"keep": "disk"}, {"keep": "ram", "lookup": True}):
        exact = record_answer(sessions("snapkv", exact=True, **settings), SAMPLINGS["greedy"])
        check_alike(exact, full)
        assert exact.drafts.exact


def test_compressed_rows_alone_say_something_else(sessions, of_full, native):
    """Without this difference, the tests above could not fail."""
    full = of_full("greedy")
    assert record_answer(sessions("snapkv"), SAMPLINGS["greedy"]).ids != full.ids


def answers_of(session):
    """Returns the answers to all questions. The first question has an image."""
    session.clear()
    asked = [(question, [SCENE] if i == 0 else []) for i, question in enumerate(QUESTIONS)]
    return [session.ask(*one, Sampling(max_tokens=40)).read() for one in asked]


def test_later_questions(sessions, drafting_much, native):
    assert answers_of(sessions("snapkv", keep="ram", exact=True)) == answers_of(sessions("full"))


@pytest.mark.parametrize("n", [1, 3, 8])
def test_an_answer_that_is_broken_off_stays_as_far_as_it_went(sessions, drafting_much, native, n):
    exact = broken_off(sessions("snapkv", keep="ram", exact=True), n)
    assert exact == broken_off(sessions("full"), len(exact[0]))


def test_lookup_alone_leaves_whole_rows_to_later_questions(sessions, native, monkeypatch):
    """Lookup alone verifies with the compressed rows, so the answers do not change."""
    plain = answers_of(sessions("snapkv", keep="ram"))
    monkeypatch.setattr(drafting.Drafter, "_best", lambda self, kind, most, each=0: (most, 1.0))
    session = sessions("snapkv", keep="ram", lookup=True)
    assert answers_of(session) == plain
    assert session.last_report.drafts.drafted > 0 and session.last_report.drafts.exact is None


def test_quantised_rows(sessions, of_full, drafting_much, native):
    """Quantised rows only draft; verification uses whole f16 rows."""
    full = of_full("greedy")
    check_alike(record_answer(sessions("snapkv", keep="ram", exact=True, kv_type="q4_0"), SAMPLINGS["greedy"]), full)


@pytest.mark.parametrize("plan", ["snapkv", "ragged", "biased"])
def test_drafts_on_a_device(sessions, drafting_much, native, plan):
    """The CPU acts as a device: its rows draft, and verification uses rows on the host."""
    full = record_answer(sessions("full", device="CPU"), SAMPLINGS["greedy"])
    session = sessions(plan, keep="ram", exact=True, device="CPU")
    drafting_much(2)
    exact = record_answer(session, SAMPLINGS["greedy"])
    assert (exact.ids, exact.later) == (full.ids, full.later)
    assert exact.drafts.exact and exact.drafts.accepted > 0
    stats = session.engine.cache.stats()
    assert 0.9 * stats.bytes < stats.device_bytes and stats.whole_bytes > 0  # biases are on the host


@pytest.mark.parametrize("kind", ["qwen2vl", "gemma3", *whole("llama", "llava", "qwen3vl", "gemma4")])
def test_other_models(tiny, picture_file, drafting_much, native, kind):
    model = tiny(kind, weight="f32")  # with f16, a batch rounds differently from single tokens
    pictures = [picture_file()] if model.mmproj else []
    chosen = Sampling(max_tokens=30, temp=0.7, seed=3)
    with model.session() as session:
        full = record_answer(session, chosen, pictures)
    drafting_much(3)
    with model.session(pykvedge.plan("snapkv", 0.3), keep="ram", exact=True) as session:
        exact = record_answer(session, chosen, pictures)
    check_alike(exact, full)
    assert exact.drafts.drafted > 0


def test_where_whole_rows_are_given_up_the_report_says_so(native, tmp_path):
    plan, settings = pykvedge.plan("snapkv", 0.1), {"threads": 1, "keep": "ram", "exact": True}
    with pykvedge.Session(plan=plan, keep_space=1000, **settings) as session:
        answer = session.ask(AGAIN, [SCENE], Sampling(max_tokens=8))
        assert answer.read()
        assert answer.report.drafts.exact is False and any(
            "--keep has no effect on this conversation" in note for note in answer.report.notes
        )
        assert any("may differ from that of --method full" in note for note in answer.report.notes)
        session.save(tmp_path / "s.kvs")
    with pykvedge.Session(plan=plan, **settings) as session:
        session.load(tmp_path / "s.kvs")  # a session file has only the compressed rows
        answer = session.ask("Why?", sampling=Sampling(max_tokens=8))
        assert answer.read() and answer.report.drafts.exact is False
        assert sum("may differ from that of --method full" in note for note in answer.report.notes) == 1


def test_a_prompt_that_is_kept_as_a_whole_is_exact(native):
    with pykvedge.Session(plan=pykvedge.plan("snapkv", 4000), threads=1, keep="ram", exact=True) as session:
        answer = session.ask(AGAIN, [SCENE], Sampling(max_tokens=8))
        assert answer.read() and answer.report.drafts.exact


def test_what_cannot_be_exact_is_refused(tiny, native):
    with pytest.raises(UsageError, match="keep"):
        tiny("llama").session(exact=True)
    with pytest.raises(UsageError, match="sliding"):
        tiny("llama").session(pykvedge.plan("h2o", 0.3, decode="sliding"), keep="ram", exact=True)
    with pytest.raises(UsageError, match="stream"):
        tiny("llama").session(keep="ram", exact=True, stream=True)
    with pytest.raises(UnsupportedError, match="recurrent"):
        tiny("lfm2").session(pykvedge.plan("snapkv", 0.3), keep="ram", exact=True)


def test_the_option(kvedge, native):
    base = ["chat", "--image", SCENE, "--threads", 1, "--max-tokens", 40, "--json"]
    full = kvedge(*base, "--method", "full", AGAIN).json
    done = kvedge(*base, "--method", "snapkv", "--budget", 0.1, "--keep", "ram", "--exact", AGAIN).json
    assert done["text"] == full["text"] and done["drafts"]["exact"] is True
    kvedge(*base, "--exact", AGAIN).failed(2, "--exact needs --keep")
