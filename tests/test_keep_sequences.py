"""Whole rows of sequences that are cut, copied and cleared, of several sequences, and of a file during its writing."""

import keep_walk
import keeping
import numpy as np
import pytest
from choosing import whole
from contexts import TinyContext, random_tokens
from keep_walk import N_SEQ, Walk
from keeping import Talk

import pykvedge
from pykvedge.errors import UnsupportedError

PLAN = pykvedge.plan("snapkv", 0.3)


@pytest.fixture
def contexts(closing, tiny):
    """contexts(plan, kind, n) -> separate contexts, the first with several sequences."""

    def make(plan=PLAN, kind="llama", n=2):
        return [closing(TinyContext(tiny(kind).model, plan, n_seq=n_seq)) for n_seq in (N_SEQ, 1, 1)[:n]]

    return make


def begun(context: TinyContext, sequence: int = 0, n: int = 150, answer: int = 5) -> Talk:
    talk = Talk(context, sequence)
    talk.say(random_tokens(n, seed=sequence))
    talk.answer(random_tokens(answer, seed=sequence))
    return talk


@pytest.mark.parametrize(("method", "seed", "steps"), [("snapkv", 1, 100), ("h2o", 2, 100), *whole(
    *((method, seed, 2000) for method in keep_walk.METHODS for seed in range(5)),
)])  # fmt: skip
def test_a_random_walk(contexts, tmp_path, method, seed, steps):
    places = [("ram", ""), ("disk", str(tmp_path))]
    made = keep_walk.walk(Walk(*contexts(pykvedge.plan(method, 0.3)), places, seed), steps)
    assert made.compared > steps / 5 and not made.given_up
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("kind", ["llama", *whole("qwen3", "qwen2vl")])
def test_copies_go_different_ways(contexts, tmp_path, kind, place):
    """Copies in the middle of an answer never share later rows.

    Not with windows: other sequences lose rows that the first tokens of an answer saw (llama_memory_seq_pos_min).
    """
    context, other = contexts(kind=kind)
    context.cache.keep(place, str(tmp_path))
    one = begun(context)
    two, three = one.copy(1), one.copy(2)
    for talk in (one, two, three):
        talk.answer(random_tokens(4, seed=40 + talk.sequence))
    three.cut(100)
    for turn in range(2):
        for talk in (one, two, three):
            talk.say(random_tokens(40, seed=10 * turn + talk.sequence))
            assert keeping.nearly_equal_pairs(context, talk.anew(other), talk.sequence), (turn, talk.sequence)
            talk.answer(random_tokens(3, seed=20 * turn + talk.sequence))
    assert len({str(context.held(i)) for i in range(3)}) == 3
    assert not any(context.cache.keep_problem(i) for i in range(3))


def test_what_was_removed_is_removed_again_for_nothing(contexts):
    context, other = contexts()
    context.cache.keep("ram")
    talk = begun(context)
    talk.cut(60, 70)
    talk.say(random_tokens(33, seed=1))
    talk.cut(64, 70)
    talk.say(random_tokens(13, seed=2))  # shorter than the window
    assert keeping.nearly_equal_pairs(context, talk.anew(other))


def test_several_at_once(contexts):
    context, other = contexts()
    context.cache.keep("ram")
    talks = [Talk(context, i) for i in range(3)]
    for turn in range(3):
        parts = [[*talk.answered, *random_tokens(60 + 10 * i, seed=turn + i)] for i, talk in enumerate(talks)]
        for talk, part in zip(talks, parts, strict=True):
            talk.cut(talk.n - len(talk.answered))
            talk.log.append(part)
        context.decode(*parts)
        for talk in talks:
            talk.compress()
            assert keeping.nearly_equal_pairs(context, talk.anew(other), talk.sequence), (turn, talk.sequence)
        for step in range(4):
            context.decode(*([7 + step + i] for i in range(3)))
            for i, talk in enumerate(talks):
                talk.answered = [*talk.answered, 7 + step + i]


def test_a_short_message_behind_a_cut_goes_by_its_own_queries(contexts):
    """A window contains no queries of removed tokens or of an answer, as if the prompt had been short at first."""
    held = []
    for context, n in zip(contexts(pykvedge.plan("snapkv", 400)), (150, 100), strict=True):
        context.cache.keep("ram")
        talk = Talk(context)
        talk.say(random_tokens(150)[:n])
        talk.cut(100)
        talk.answer([8, 9, 10, 11, 12])
        context.cache.set_plan(PLAN)
        context.decode(random_tokens(3))
        context.cache.compress()
        assert not context.cache.keep_problem()
        held.append(context.held())
    assert held[0] == held[1]


def test_copies_are_counted_once_and_the_oldest_goes_first(contexts):
    context, alone = contexts()
    context.cache.keep("ram")
    first = begun(context)
    n = context.cache.stats().whole_bytes
    context.cache.keep("ram", "", int(2.5 * n))
    first.copy(3)
    begun(context, 1)
    assert [context.cache.stats(i).whole_bytes > 0 for i in range(4)] == [True, True, False, True]
    begun(context, 2)
    assert [context.cache.stats(i).whole_bytes > 0 for i in range(4)] == [False, True, True, False]
    for i in (0, 3):
        assert "exceeded the limit" in context.cache.keep_problem(i)
    keeping.emptied(alone)
    without = begun(alone)
    first.answer([9]), without.answer([9])  # the answer goes on in a sequence that lost its whole rows
    np.testing.assert_array_equal(context.logits(), alone.logits())


def test_what_is_too_much_by_itself_is_given_up_and_the_answer_goes_on(contexts):
    context, alone = contexts()
    context.cache.keep("ram", "", 1000)
    talks = begun(context), begun(alone)
    assert "exceeded the limit" in context.cache.keep_problem() and context.cache.stats().whole_bytes == 0
    np.testing.assert_array_equal(context.logits(), alone.logits())
    for talk in talks:
        talk.decode(random_tokens(30))
        talk.context.cache.compress()
    assert keeping.equal_pairs(context, alone)


def test_a_place_that_changes_in_the_middle(contexts, tmp_path):
    context, other = contexts()
    talk = Talk(context)
    kept = []
    for turn, place in enumerate(["ram", "disk", "ram", "disk"]):
        context.cache.keep(place, str(tmp_path))
        talk.say(random_tokens(100, seed=turn))
        assert keeping.equal_pairs(context, talk.anew(other))
        talk.answer([5, 6, 7, 8])
        kept.append(context.cache.stats())
    assert all(stats.whole_bytes > 0 for stats in kept)
    context.cache.keep("")  # existing whole rows serve one more message
    talk.say(random_tokens(50))
    assert keeping.equal_pairs(context, talk.anew(other))
    assert context.cache.stats().whole_bytes == 0 and not context.cache.keep_problem()
    context.cache.keep("ram")
    context.decode(random_tokens(40))
    context.cache.compress()
    assert "was compressed before without" in context.cache.keep_problem()
    assert context.cache.stats().whole_bytes == 0


def test_what_drops_rows_for_good_is_refused_where_they_are_kept(contexts):
    (context,) = contexts(pykvedge.plan("streaming-llm", 40), n=1)
    context.cache.keep("ram")
    begun(context)
    for on in (True, False):
        if not on:
            context.cache.keep("")
        with pytest.raises(UnsupportedError, match="whole rows are kept"):
            context.cache.bound_prompt(np.zeros(10, np.uint8))
        with pytest.raises(UnsupportedError, match="whole rows are kept"):
            context.cache.compress_stream()


def test_positions_change_under_rows_that_lie_in_a_file(contexts, tmp_path):
    """Between a message and its compression, the rows are those of the file, which is read-only."""
    context, other = contexts(pykvedge.plan("knorm", 0.3))
    context.cache.keep("disk", str(tmp_path))
    talk = begun(context)
    while not context.cache.stats().whole_file_bytes:
        talk.answer([9])
    copy = talk.copy(1)
    context.decode(random_tokens(20))
    was = keeping.rows(context)
    context.cache.renumber(talk.n, 100)
    now, others = keeping.rows(context), Talk(context, 1, copy.log, copy.answered)
    assert any((a[0] != b[0]).any() for a, b in zip(was, now, strict=True))
    others.say(random_tokens(20))
    assert keeping.nearly_equal_pairs(context, others.anew(other), 1)


def test_what_a_copy_has_in_memory_goes_when_it_is_written(contexts, tmp_path):
    """Includes a copy that reads nothing, as the copy of `undo`."""
    (context,) = contexts(n=1)
    context.cache.keep("disk", str(tmp_path))
    talk = begun(context, answer=1)
    talk.copy(1)
    while not context.cache.stats().whole_file_bytes:
        talk.answer([9])
    assert context.cache.stats(1).whole_file_bytes == context.cache.stats().whole_file_bytes
