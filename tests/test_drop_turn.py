"""Turns leave a conversation, and later turns move up, without reading anything again."""

import pytest
from test_ageing import CODES, GREEDY, QUESTIONS, held, inside, reads, talk  # noqa: F401

import pykvedge
from pykvedge.errors import StateError, UnsupportedError, UsageError


def ask(session, question, *scenes):
    return session.ask(question, scenes, GREEDY).read().strip()


@pytest.mark.parametrize("method", ["snapkv", "kvedge", "h2o"])
@pytest.mark.parametrize("keep", ["ram", "disk"])
def test_a_turn_is_gone_and_the_others_stay(talk, reads, tmp_path, method, keep):  # noqa: F811
    folder = {"keep_folder": str(tmp_path)} if keep == "disk" else {}
    session = talk(method, 0.6 if method == "h2o" else 0.3, keep=keep, **folder)
    begin, end = session._begins[2], session._begins[4]
    n, cache = reads[0], session.engine.cache
    before, position = cache.stats(), session.engine.sequence.n_past
    session.drop_turn(2)
    after = cache.stats()
    assert reads[0] == n and [m.text for m in session.messages[::2]] == [QUESTIONS[0], QUESTIONS[2]]
    assert session.engine.sequence.n_past == position - (end.position - begin.position)
    assert all(len(inside(tokens, (begin.token, end.token))) == 0 for heads in held(session) for tokens in heads)
    gone = (end.token - begin.token) * session.model.kv_bytes_per_token(2)
    assert gone <= before.whole_bytes - after.whole_bytes < 1.2 * gone  # and the observed data of these rows
    assert ask(session, "What is the code in image 1?") == CODES[0]
    kv = session.last_report.kv
    assert 0.8 * kv.whole_bytes < kv.full_bytes <= kv.whole_bytes  # the rows and their observed data
    assert ask(session, "What is the code in image 2?") == CODES[2]
    session.demote(2, 0.1)  # turn 2, formerly turn 3
    assert len(session.engine.ages) == 2


@pytest.mark.parametrize("exact", [False, True])
def test_a_long_conversation_stays_as_short_as_its_turns(talk, reads, closing, tmp_path, exact):  # noqa: F811
    session, lengths = talk(n_ctx=800, exact=exact), []
    for _ in range(16):  # in total more tokens than the context can hold
        assert ask(session, "What is the code in image 3?") == CODES[2]
        while len(session.messages) > 8:
            session.drop_turn(len(session.messages) // 2 - 1)
        lengths.append(session.engine.sequence.n_past)
    assert len(set(lengths[1:])) == 1, lengths
    assert session.engine.cache.stats().n_tokens > 800
    n = reads[0]
    session.drop_turn(2)
    assert reads[0] == n and ask(session, "What is the code in image 2?") == CODES[2]
    drafts, stats = session.last_report.drafts, session.engine.cache.stats()
    if exact:  # a batch reads no more than what there is
        assert 0 < drafts.read_bytes <= drafts.drafted * stats.bytes + drafts.verifications * stats.whole_bytes
    session.save(tmp_path / "talk.kvs", whole=True)
    other = closing(pykvedge.Session(plan=session.plan, threads=2, keep="ram", n_ctx=800, exact=exact))
    other.load(tmp_path / "talk.kvs")
    assert ask(other, "What is the code in image 1?") == ask(session, "What is the code in image 1?") == CODES[0]


def test_what_was_done_before_and_what_comes_after(talk, closing, tmp_path):  # noqa: F811
    session = talk(undo=True)
    session.drop_turn(2)
    with pytest.raises(StateError, match="no message to undo"):
        session.undo()
    assert ask(session, "What is the code in image 2?") == CODES[2]
    session.undo()
    assert [m.text for m in session.messages[::2]] == [QUESTIONS[0], QUESTIONS[2]]
    other = closing(session.fork())
    session.save(tmp_path / "talk.kvs", whole=True)
    loaded = closing(pykvedge.Session(plan=pykvedge.plan("snapkv", 0.3), threads=2, keep="ram"))
    loaded.load(tmp_path / "talk.kvs")
    for one in (session, other, loaded):
        assert ask(one, "What is the code in image 2?") == CODES[2]
        assert len(one.engine.ages) == 2
    with pytest.raises(StateError, match="turn 2 cannot be dropped, because its tokens were read together"):
        loaded.drop_turn(2)


def test_what_cannot_be_dropped_is_said_in_a_line(talk, reads, closing):  # noqa: F811
    session = talk()
    for turn in (0, 1, 3, 4, -1, 2.0, True, "2", None):
        with pytest.raises(UsageError, match="cannot be dropped: the conversation has 3 turns"):
            session.drop_turn(turn)
    n = len(session.messages)
    with pytest.raises(UnsupportedError, match="reads the conversation twice"):
        talk("kvzip").drop_turn(2)
    other = talk("meda")
    before = reads[0]
    with pytest.raises(UnsupportedError, match="positions cannot be changed; use a method without allocator entropy"):
        other.drop_turn(2)
    assert ask(other, "What is the code in image 3?") and reads[0] < before + 60  # the conversation still exists
    with pytest.raises(UsageError, match="set keep to 'ram' or 'disk'"):
        talk(keep=None).drop_turn(2)
    session.drop_turn(2)
    assert len(session.messages) == n - 2
    session.forget()  # as after an interrupted answer: everything is read again, and no turn can be dropped
    assert ask(session, "What is the code in image 2?") == CODES[2]
    with pytest.raises(StateError, match="read together with other turns"):
        session.drop_turn(2)
