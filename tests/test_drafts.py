"""Drafted answers equal answers without drafts, token by token, whatever the guesses are."""

import numpy as np
import pytest
from choosing import whole
from drafted import AGAIN, PLANS, SAMPLINGS, SCENE, broken_off, check_alike, open_sessions, record_answer, wrong_behind

import pykvedge
from pykvedge import Sampling, UnsupportedError, UsageError
from pykvedge.runtime import drafting
from pykvedge.runtime.generation import Generation
from pykvedge.runtime.report import Drafts, Report


@pytest.fixture
def guessing(monkeypatch):
    """guessing(ids, right): answers are drafted with the tokens `ids`, as many as fit. In each batch, only the first
    `right`
    guesses are right.
    """

    def use(ids, right):
        def guess(self, generation, most):
            return wrong_behind(ids[len(generation.tokens) :][:most], right), 2

        monkeypatch.setattr(drafting.Drafter, "_guess", guess)
        monkeypatch.setattr(drafting.Drafter, "_best", lambda self, kind, most, each=0: (most, 1.0))

    return use


@pytest.fixture(scope="module")
def sessions():
    with open_sessions(PLANS) as make:
        yield make


CASES = [
    *[("snapkv", name) for name in SAMPLINGS],
    ("full", "greedy"),
    *whole(*[(plan, name) for plan in ("full", "lookm") for name in SAMPLINGS if (plan, name) != ("full", "greedy")]),
]


@pytest.mark.parametrize("plan, sampling", CASES)
def test_whatever_is_guessed_the_answer_is_that_of_single_tokens(sessions, guessing, native, plan, sampling):
    chosen = SAMPLINGS[sampling]
    plain = record_answer(sessions(plan), chosen)
    assert plain.drafts is None and len(plain.ids) > 3
    drafting_session = sessions(plan, lookup=True)
    for right in (99, 0, 3) if sampling == "greedy" else (3,):
        guessing(plain.ids, right)
        drafted = record_answer(drafting_session, chosen)
        check_alike(drafted, plain)
        counts = drafted.drafts
        assert counts.verifications > 0 and counts.drafted > 0
        if right == 0:
            assert counts.accepted == 0
        elif right == 99:  # except the guess that ends the answer
            assert counts.accepted >= counts.drafted - 1
            assert counts.verifications <= len(plain.ids) // drafting.MOST + 2
        else:
            assert 0 < counts.accepted <= 3 * counts.verifications


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0", "kivi2", *whole("f32", "bf16", "tq3", "kivi4", "q8_0:q4_0")])
def test_rows_that_are_quantised_in_groups(sessions, guessing, native, kv_type):
    chosen = Sampling(max_tokens=100, logit_bias={sessions("snapkv").model.tokenize("x", special=False)[0]: 4.0})
    plain = record_answer(sessions("snapkv", kv_type=kv_type), chosen)
    assert len(plain.ids) > 70 or plain.finish == "end"
    for right in (99, 2):
        guessing(plain.ids, right)
        drafted = record_answer(sessions("snapkv", kv_type=kv_type, lookup=True), chosen)
        check_alike(drafted, plain)
        assert drafted.drafts.accepted > 0


OTHERS = ["qwen2vl", "gemma3", "deepseek2", *whole("llama", "llava", "qwen3vl", "gemma3n", "gemma4")]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models(tiny, picture_file, guessing, native, kind):
    """Image positions, windowed layers, layers that read another layer's rows, layers in llama.cpp's cache."""
    model = tiny(kind, weight="f32")  # f16 weights round inputs, and a batch sums in another order than single tokens
    pictures = [picture_file()] if model.mmproj else []
    chosen = Sampling(max_tokens=40, temp=0.7, seed=3)
    plan = pykvedge.plan("full") if kind == "deepseek2" else pykvedge.plan("snapkv", 0.4)
    with model.session(plan) as session:
        assert kind != "deepseek2" or session.engine.cache is None
        plain = record_answer(session, chosen, pictures)
    guessing(plain.ids, 4)
    with model.session(plan, lookup=True) as session:
        drafted = record_answer(session, chosen, pictures)
    check_alike(drafted, plain)
    assert drafted.drafts.accepted > 0


@pytest.mark.parametrize("plan", ["full", "snapkv"])
def test_lookup_as_it_is(sessions, native, monkeypatch, plan):
    """Drafts from the conversation itself, at any cost."""
    plain = record_answer(sessions(plan), SAMPLINGS["greedy"])
    monkeypatch.setattr(drafting.Drafter, "_best", lambda self, kind, most, each=0: (most, 1.0))
    drafted = record_answer(sessions(plan, lookup=True), SAMPLINGS["greedy"])
    check_alike(drafted, plain)
    assert 0 < drafted.drafts.accepted < drafted.drafts.drafted


@pytest.mark.parametrize("n", [1, 4, 9, 14])
def test_an_answer_that_is_broken_off_stays_as_far_as_it_went(sessions, guessing, native, n):
    plain = record_answer(sessions("snapkv"), SAMPLINGS["greedy"])

    guessing(plain.ids, 3)
    drafted = broken_off(sessions("snapkv", lookup=True), n)
    assert drafted == broken_off(sessions("snapkv"), len(drafted[0]))


def test_a_cancelled_answer_leaves_a_session_that_goes_on(sessions, guessing, native):
    import threading

    plain = record_answer(sessions("snapkv"), SAMPLINGS["greedy"])
    guessing(plain.ids, 2)
    session, cancel = sessions("snapkv", lookup=True), threading.Event()
    session.clear()
    session.cancel = cancel
    answer = session.ask(AGAIN, [SCENE], SAMPLINGS["greedy"])
    next(answer)
    cancel.set()
    answer.read()
    cancel.clear()
    session.cancel = None
    assert answer.report.finish == "cancelled" and plain.text.startswith(answer.report.text)
    assert session.ask("Why?", sampling=Sampling(max_tokens=12)).read()
    check_alike(record_answer(session, SAMPLINGS["greedy"]), plain)


def test_the_context_ends_a_drafted_answer_where_it_ends_another(tiny, guessing, native):
    chosen = Sampling(max_tokens=500)
    ends = []
    ids = []
    model = tiny("llama", weight="f32")  # with f16, a batch rounds differently from single tokens
    for settings in ({}, {"lookup": True}):
        with model.session(n_ctx=64, **settings) as session:
            answer = session.ask("What is there to see?", sampling=chosen)
            answer.read()
            ids = answer._generation.tokens
            ends.append((answer.report.finish, ids, session.engine.context.at.n_cells))
        guessing(ids, 99)
    assert ends[0] == ends[1] and ends[0][0] == "context"


def test_positions_turn_where_they_turn_without_drafts(tiny, guessing, native):
    """An answer longer than the trained length: keys turn before the same token."""
    chosen, ends, ids = Sampling(max_tokens=120, temp=1.0, seed=5), [], []
    for settings in ({}, {"lookup": True}):
        model = tiny("llama", weight="f32")
        with model.session(pykvedge.plan("snapkv", 64), positions=256, n_ctx=4096, **settings) as session:
            answer = session.ask("What is there to see, and what is it good for? " * 10, sampling=chosen)
            answer.read()
            ids, sequence = answer._generation.tokens, session.engine.sequence
            ends.append((ids, answer.report.finish, sequence.n_past, sequence.n_cells))
            assert session.engine._positions.n_renumberings > 0
        guessing(ids, 99)
    assert ends[0] == ends[1] and len(ids) > 100


def test_a_saved_session_goes_on(sessions, native, tmp_path):
    session, file = sessions("snapkv", lookup=True), tmp_path / "s.kvs"
    record_answer(session, SAMPLINGS["greedy"])
    session.save(file)
    expected = session.ask("Why?", sampling=SAMPLINGS["greedy"]).read()
    session.load(file)
    assert session.ask("Why?", sampling=SAMPLINGS["greedy"]).read() == expected
    with session.fork() as other:
        a = other.ask("Where?", sampling=SAMPLINGS["greedy"]).read()
    assert a == session.ask("Where?", sampling=SAMPLINGS["greedy"]).read()


# ------------------------------------------------------------------------------------------------------------
# With a temperature


def chi_square(counts, p):
    """Returns the chi-square statistic of draws with probabilities p, and its degrees of freedom. Joins rare ones."""
    n = counts.sum()
    many = p * n >= 5
    seen = np.append(counts[many], counts[~many].sum())
    expected = np.append(p[many], p[~many].sum()) * n
    seen, expected = seen[expected > 0], expected[expected > 0]
    return ((seen - expected) ** 2 / expected).sum(), len(seen) - 1


def softmax(logits, temp):
    scaled = logits.astype(np.float64) / temp
    e = np.exp(scaled - scaled.max())
    return e / e.sum()


@pytest.mark.parametrize("draws, whole_rows", [(3000, False), (3000, True), *whole((20000, False), (20000, True))])
def test_tokens_have_the_probabilities_that_they_have_without_guesses(tiny, native, draws, whole_rows):
    """Compares the first two tokens after a guess, drawn with many seeds, with softmax in NumPy.

    With whole rows, the probabilities must be those of a session with the full cache.
    """
    model = tiny("llama", weight="f32")  # with f16, a batch rounds differently from single tokens
    temp, settings = 0.8, {"keep": "ram", "exact": True} if whole_rows else {"lookup": True}
    first, likely, p1, p2 = 0, 0, np.empty(0), np.empty(0)
    with model.session(pykvedge.plan("full" if whole_rows else "snapkv", None if whole_rows else 0.4)) as plain:
        plain.ask("What is there to see?", sampling=Sampling(max_tokens=1)).read()
        [first] = plain.pending
        plain.engine.extend(first)
        p1 = softmax(plain.engine.context.logits().copy(), temp)
        likely = int(p1.argmax())
        plain.engine.extend(likely)
        p2 = softmax(plain.engine.context.logits().copy(), temp)
    with model.session(pykvedge.plan("snapkv", 0.4), **settings) as session:
        session.ask("What is there to see?", sampling=Sampling(max_tokens=1)).read()
        sequence, context = session.engine.sequence, session.engine.context
        assert session.pending == [first]
        sequence.verify([first, likely, 3], whole_rows)
        for place, p in ((0, p1), (1, p2)):
            np.testing.assert_allclose(softmax(context.logits(place), temp), p, atol=1e-4)
        seen, n_right = [np.zeros(len(p1)), np.zeros(len(p1))], 0
        for seed in range(draws):
            sampling = Sampling(temp=temp, seed=seed, top_k=0, top_p=1.0, max_tokens=50)
            generation = Generation(session.model, sampling, Report("snapkv", 0.4))
            generation.token = first
            generation.choose_each(context, [first, likely, 3], 100)
            got = [*generation.tokens, *([generation.token] if generation.ended else [])]
            seen[0][got[0]] += 1
            if got[0] == likely:
                n_right += 1
                seen[1][got[1]] += 1
            else:
                assert len(got) == 1  # the guess was wrong: what follows it is ignored
            generation.close()
        sequence.accept(1)
    assert n_right > 50
    for counts, p in zip(seen, (p1, p2), strict=True):
        value, free = chi_square(counts, p)
        assert free > 5 and value < free + 4 * np.sqrt(2 * free) + 8, (value, free)


# ------------------------------------------------------------------------------------------------------------
# How many guesses pay


def cost(n):
    return 1.0 if n == 1 else 1.5 + 0.1 * n


def test_the_costs_of_batches_are_learned():
    costs = drafting.Costs()
    assert costs.of(1) == costs.of(5) == 0.0
    costs.took(1, 1.0)
    assert costs.of(1) == 1.0 and costs.of(5) == 2.0  # an estimate, so that this size is tried
    for n in (2, 8):
        costs.took(n, cost(n))
    assert costs.of(8) == cost(8) and costs.of(5) == pytest.approx(cost(5))
    costs.took(3, 9.0)
    assert costs.of(3) == cost(8)  # three tokens take at most as long as eight
    for seconds in (1.8, 1.8, 1.8):
        costs.took(3, seconds)
    assert costs.of(3) == 1.8
    for _ in range(300):
        costs.took(1, 2.0)
    assert costs.of(1) == 2.0 and costs.of(8) == 2.0 + 7 * 0.5  # the measurement is too old, so the size is tried again


@pytest.mark.parametrize("rate, expensive, least, most", [(0.97, False, 8, 15), (0.05, False, 0, 0), (0.9, True, 0, 0)])
def test_guesses_are_as_many_as_pay(rate, expensive, least, most):
    drafter = drafting.Drafter(None, None, None)
    assert drafter._best(2, 15) == (0, 0.0)  # nothing is measured yet
    for n in (1, *range(2, 17)):
        drafter._costs.took(n, float(n) if expensive else cost(n))
    rng = np.random.default_rng(1)
    for _ in range(200):
        drafter._hits.saw(2, rng.random() < rate)
    assert least <= drafter._best(2, 15)[0] <= most
    assert drafter._best(2, 0) == (0, 1.0)


# Refusals and reports


def test_what_cannot_take_guesses_back_is_refused(tiny, native):
    plan = pykvedge.plan("h2o", 0.3, decode="heavy-hitter")
    with pytest.raises(UsageError, match=r"heavy-hitter.*keep-all"):
        tiny("llama").session(plan, lookup=True)
    with tiny("llama").session(lookup=True) as session:
        with pytest.raises(UsageError, match="heavy-hitter"):
            session.set_plan(plan)
        assert session.ask("Hello", sampling=Sampling(max_tokens=4)).read()
    with pytest.raises(UsageError, match="stream"):
        tiny("llama").session(lookup=True, stream=True)
    with pytest.raises(UsageError, match="lookup must be"):
        tiny("llama").session(lookup=3)
    with pytest.raises(UnsupportedError, match="recurrent"):
        tiny("lfm2").session(lookup=True)


def test_the_option(kvedge, native):
    base = ["chat", "--image", SCENE, "--threads", 1, "--max-tokens", 60]
    plain = kvedge(*base, "--json", AGAIN).json
    done = kvedge(*base, "--json", "--lookup", AGAIN).json
    assert "drafts" not in plain and done["text"] == plain["text"]
    counts = done["drafts"]
    assert set(counts) == {"drafted", "accepted", "verifications", "acceptance", "tokens_per_verification"}
    assert 0 <= counts["accepted"] <= counts["drafted"]
    kvedge(*base, "--lookup", "--stream", "--budget", 64, AGAIN).failed(2, "stream")
    kvedge(*base, "--lookup", "--method", "h2o", "--decode", "sliding", AGAIN).failed(2, "sliding", "keep-all")


def test_the_report():
    report = Report("full", 1.0, drafts=Drafts())
    assert report.as_json()["drafts"]["acceptance"] is None and "draft" not in report.line()
    for drafted, accepted in ((4, 4), (4, 1), (2, 0)):
        report.drafts.add(drafted, accepted)
    assert report.as_json()["drafts"] == {
        "drafted": 10,
        "accepted": 5,
        "verifications": 3,
        "acceptance": 0.5,
        "tokens_per_verification": 2.67,
    }
    assert "5 of 10 draft tokens accepted" in report.line()
