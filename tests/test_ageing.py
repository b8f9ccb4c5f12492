"""Images that lose KV pairs with age, or are forgotten, and get pairs back without being read again."""

import math

import numpy as np
import pytest
from choosing import whole
from conftest import THREADS
from eval_runs import MMPROJ, MODEL

import pykvedge
from pykvedge.errors import StateError, UsageError
from pykvedge.library import libkvedge

SCENES = [f"examples/scene-{i}.png" for i in (1, 2, 3)]
CODES = ["64UM3", "4LPY5", "2L4T"]
GREEDY = pykvedge.Sampling(temp=0, max_tokens=20)
QUESTIONS = ["What is the code?", "What is the code in image 2?", "What is the code in image 3?"]


@pytest.fixture
def talk(closing):
    """talk(method, budget, **settings) -> a session with a conversation about three scenes, with whole rows."""

    def make(method="snapkv", budget=0.3, **settings):
        settings = {"keep": "ram", **settings}
        session = closing(pykvedge.Session(plan=pykvedge.plan(method, budget), threads=THREADS, **settings))
        for question, scene in zip(QUESTIONS, SCENES, strict=True):
            session.ask(question, [scene], GREEDY).read()
        return session

    return make


def held(session):
    """Returns the held token indices as arrays: [layer][head]."""
    cache = session.engine.cache
    return [[np.array(cache.tokens(i, h)) for h in range(len(heads))] for i, heads in enumerate(cache.lengths())]


def same(a, b):
    return all(np.array_equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


def inside(tokens, span):
    return tokens[(tokens >= span[0]) & (tokens < span[1])]


@pytest.fixture
def reads(monkeypatch):
    """Counts the tokens that pass through the model."""
    from pykvedge.runtime.driver import Driver

    count, decode = [0], Driver.decode

    def counted(self, at, piece, want_logits):
        count[0] += piece.n_tokens
        return decode(self, at, piece, want_logits)

    monkeypatch.setattr(Driver, "decode", counted)
    return count


@pytest.mark.parametrize("method", ["snapkv", "kvedge", "h2o", "adakv"])
def test_an_image_keeps_its_best_rows_or_none_and_gets_them_back(talk, reads, method):
    session = talk(method)
    before, size, n = held(session), session.engine.cache.stats().bytes, reads[0]
    spans = [(image.first, image.last) for image in session.engine.sequence.images]
    assert [last - first for first, last in spans] == [144] * 3
    session.demote(2, 4)
    after = held(session)
    for old, new in zip(before, after, strict=True):
        for a, b in zip(old, new, strict=True):
            assert set(b) <= set(a) and len(inside(b, spans[1])) == min(4, len(inside(a, spans[1])))
            assert np.array_equal(np.setdiff1d(b, np.arange(*spans[1])), np.setdiff1d(a, np.arange(*spans[1])))
    assert session.engine.cache.stats().bytes < size
    session.demote(2, 0.05)
    assert max(len(inside(t, spans[1])) for heads in held(session) for t in heads) <= math.ceil(0.05 * 144)
    session.forget_image(2)
    assert all(not len(inside(t, spans[1])) for heads in held(session) for t in heads)
    session.promote(2)
    assert same(held(session), before) and session.engine.cache.stats().bytes == size
    assert reads[0] == n


def test_the_rows_that_stay_are_the_best_by_score(native, tiny):
    """Compares the kept rows with the scores before the compression, in NumPy."""
    from contexts import TinyContext, random_tokens

    with TinyContext(tiny("qwen3").model, pykvedge.plan("snapkv", 0.5)) as context:
        context.cache.keep("ram")
        context.decode(random_tokens(200))
        scores = [libkvedge.pending_scores(context.cache, i) for i in range(2)]
        context.cache.compress()
        before = context.held()
        context.cache.limit_tokens(40, 120, 7)
        context.cache.choose_again()
        for layer, heads in enumerate(context.held()[:2]):
            for h, tokens in enumerate(heads):
                span = [t for t in before[layer][h] if 40 <= t < 120]
                best = sorted(sorted(span, key=lambda t: (-scores[layer][h][t], t))[:7])
                assert [t for t in tokens if 40 <= t < 120] == best


@pytest.mark.parametrize("most", [0, 7, 100])
def test_a_number_of_pairs_goes_to_tokens_without_a_limit(native, tiny, most):
    """Limited tokens keep their best rows; the budget then goes to the best of all other rows. Compared in NumPy."""
    from contexts import TinyContext, random_tokens

    with TinyContext(tiny("qwen3").model, pykvedge.plan("vnorm", 60, recent=0, sinks=0)) as context:
        context.cache.keep("ram")
        context.decode(random_tokens(200))
        scores = [libkvedge.pending_scores(context.cache, i) for i in range(2)]
        context.cache.limit_tokens(40, 180, most)
        context.cache.compress()
        for layer, heads in enumerate(context.held()[:2]):
            for h, tokens in enumerate(heads):
                order = sorted(range(200), key=lambda t: (-scores[layer][h][t], t))
                limited = [t for t in order if 40 <= t < 180][most:]
                assert list(tokens) == sorted([t for t in order if t not in limited][:60])


def test_forgotten_images_cannot_be_described_and_promoted_ones_can(talk):
    session = talk("kvedge", 0.5)
    assert session.ask("What is the code in image 2?", (), GREEDY).read() == CODES[1]
    session.forget_image(2)
    assert session.ask("What is the code in image 2?", (), GREEDY).read() != CODES[1]
    session.promote(2)
    assert session.ask("What is the code in image 2?", (), GREEDY).read() == CODES[1]


def test_images_age_until_a_question_needs_them(talk, reads):
    """Each answer is right, images get smaller while no question needs them, and no image is read twice."""
    session = talk("kvedge", 0.5, age=0.5)
    sizes, n = [], reads[0]
    for image in (3, 3, 3, 3, 1, 2):
        answer = session.ask(f"What is the code in image {image}?", (), GREEDY)
        assert answer.read() == CODES[image - 1]
        sizes.append([session.engine.ages._held(one) for one in session.engine.sequence.images])
    assert reads[0] - n < 6 * 60
    assert min(sizes[4][1], sizes[4][2]) < sizes[4][0]
    assert min(sizes[5][0], sizes[5][2]) < sizes[5][1]


@pytest.mark.parametrize("n", [12, *whole(200)])
def test_many_images(native, tiny, picture_file, reads, tmp_path, n):
    """Each image is forgotten when the next one comes. Only ten questions about the third image give it rows."""
    budget, chosen = 32 + 4 * n, pykvedge.Sampling(temp=0, grammar='root ::= "ok"')
    pictures = [picture_file(f"{i}.png", 60 + i, 50) for i in range(4)]
    settings = {"n_ctx": 60 * n + 400, "keep": "disk", "keep_folder": str(tmp_path)}
    with tiny("qwen2vl").session(pykvedge.plan("random", budget), **settings) as session:
        kept, answers = [], []

        def ask(question, shown=()):
            answer = session.ask(question, shown, chosen)
            answer.read()
            answers.append(answer.report.tokens.generated)

        def rows_of(image):
            span = session.engine.sequence.images[image - 1]
            return sum(len(inside(tokens, span[:2])) for heads in held(session) for tokens in heads)

        for i in range(n):
            if i:
                session.forget_image(i)
            ask("What is it?", [pictures[i % 4]])
            if i < 3 or i % max(n // 20, 1):
                continue
            before = reads[0]
            session.promote(3)
            assert reads[0] == before
            ask("And in the third image?")
            assert rows_of(3) > 0 == sum(map(rows_of, (1, 2)))
            session.forget_image(3)
            assert rows_of(3) == 0
            kept.append(session.engine.cache.stats().bytes)
        sequence = session.engine.sequence
        assert len(kept) >= 9 and (n == 12 or max(kept[3:]) < 1.1 * min(kept[3:]))
        rows = session.engine.pairs_held()
        assert budget <= rows < budget + 32  # at most 32 more, for the answer
        assert sum(last - first for first, last, *_ in sequence.images) < sequence.n_cells <= reads[0]
        assert reads[0] <= sequence.n_cells + sum(answers)  # the next message reads answers again


def test_limits_are_in_session_files(talk, tmp_path):
    session = talk()
    session.demote(np.int64(1), np.int64(5))
    session.forget_image(2)
    file = tmp_path / "s.kvs"
    session.save(file, whole=True)  # saving takes the answer back
    before, images = held(session), session.engine.sequence.images
    with pykvedge.Session(MODEL, MMPROJ, pykvedge.plan("snapkv", 0.3), threads=THREADS, keep="ram") as other:
        other.load(file)
        assert other.engine.sequence.images == images and same(held(other), before)
        assert [image.limit for image in images] == [5, 0, -1]
        answers = [one.ask("What is the code in image 3?", (), GREEDY).read() for one in (session, other)]
        assert answers[0] == answers[1] and same(held(session), held(other))
        assert all(not len(inside(t, images[1])) for heads in held(other) for t in heads)
        for one in (session, other):
            one.promote(2)
        assert same(held(session), held(other))
        assert any(len(inside(t, images[1])) for heads in held(other) for t in heads)
        session.save(file)  # without whole rows
        other.load(file)
        with pytest.raises(StateError, match="no whole rows"):
            other.demote(1, 0.1)


def test_what_cannot_be_is_refused_in_a_line(talk, native):
    with pykvedge.Session(MODEL, MMPROJ, pykvedge.plan("snapkv", 0.3), threads=THREADS) as session:
        with pytest.raises(StateError, match="the session has no conversation yet"):
            session.demote(1, 0.1)
        session.ask(QUESTIONS[0], [SCENES[0]], GREEDY).read()
        with pytest.raises(UsageError, match="set keep to"):
            session.demote(1, 0.1)
    session = talk()
    for image in (0, 4, True, "1"):
        with pytest.raises(UsageError, match="the conversation has"):
            session.demote(image, 0.1)
    for budget in (-1, float("nan"), "all", True, 2.5):  # 2.5 is neither a share nor a number of pairs
        with pytest.raises(UsageError, match="budget of an image"):
            session.demote(1, budget)
    for settings in ({"age": 1.0, "keep": "ram"}, {"age": -0.1, "keep": "ram"}, {"age": 0.5}):
        with pytest.raises(UsageError, match=r"age must|age needs the uncompressed KV rows"):
            pykvedge.Session(MODEL, MMPROJ, threads=THREADS, **settings)


def test_an_undo_a_fork_and_a_file_leave_images_as_old_as_they_were(talk, tmp_path, closing):
    session = talk("snapkv", 0.3, age=0.7, undo=True)

    def aged(one):
        one.ask("What is the code in image 3?", (), GREEDY).read()
        return held(one), [image.limit for image in one.engine.sequence.images]

    for _ in range(2):
        aged(session)
    file = tmp_path / "s.kvs"
    session.save(file, whole=True)
    loaded = closing(pykvedge.Session(plan=pykvedge.plan("snapkv", 0.3), threads=THREADS, keep="ram", age=0.7))
    loaded.load(file)
    fork = closing(session.fork())
    rows, limits = aged(session)
    assert max(limits) > 0
    session.undo()
    for other in (session, fork, loaded):
        again, theirs = aged(other)
        assert theirs == limits and same(again, rows)


@pytest.mark.parametrize("space", [0, 1 << 17])
def test_without_whole_rows_images_stay_as_they_are_and_questions_are_answered(talk, tmp_path, closing, space):
    """A session file without whole rows and too little space for them: both give only notes."""
    if space:
        session = talk("kvedge", 0.5, age=0.5, keep_space=space)
    else:
        first, file = talk("kvedge", 0.5), tmp_path / "s.kvs"
        first.save(file)
        session = closing(pykvedge.Session(plan=pykvedge.plan("kvedge", 0.5), threads=THREADS, keep="ram", age=0.5))
        session.load(file)
    for _ in range(2):
        answer = session.ask("What is the code in image 3?", (), GREEDY)
        assert answer.read() == CODES[2]
        assert "--keep has no effect on this conversation" in " ".join(answer.report.notes)


def test_a_decode_policy_that_drops_rows_is_refused_with_ages(native):
    """The plan is refused at the start: with ages, it would fail at the second message."""
    plan = pykvedge.plan("snapkv", 0.3, decode="sliding")
    with pytest.raises(UsageError, match="use --decode keep-all, or omit --age"):
        pykvedge.Session(plan=plan, threads=THREADS, keep="ram", age=0.5)


@pytest.mark.parametrize("method", ["h2o", "keydiff", "expected", "streaming-llm", "full"])
def test_a_method_that_does_not_see_the_question_is_refused_with_ages(talk, method):
    with pytest.raises(UsageError, match="use a method with a window scorer"):
        talk(method, None if method == "full" else 0.3, age=0.5)
    with talk("kvedge", 0.5, age=0.5) as session, pytest.raises(UsageError, match="a method with a window scorer"):
        session.set_plan(pykvedge.plan(method, None if method == "full" else 0.3))
