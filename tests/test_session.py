"""Session: conversations over several turns, changes of method, interrupted answers, and measurements."""

import threading

import numpy as np
import pytest
from conversations import SHORT, WORDS, say

import pykvedge
from pykvedge.chat.session import Session
from pykvedge.errors import ContextError, NothingToCompressError, StateError, UnknownNameError, UsageError
from pykvedge.models.model import TextStream, silent
from pykvedge.models.vision import TextPiece
from pykvedge.runtime.interrupt import CancelledError
from pykvedge.runtime.llama_context import Context
from pykvedge.runtime.sampling import Sampling


@pytest.fixture(params=["llava", "qwen2vl"])
def vision_model(request, tiny):
    return tiny(request.param)


@pytest.fixture
def tokens(monkeypatch):
    """Collects the tokens that are read from now on."""
    out, decode = [], Context.decode
    monkeypatch.setattr(Context, "decode", lambda self, new, *rest: (out.extend(new), decode(self, new, *rest))[1])
    return out


def test_pieces_add_up_to_the_text(vision_model, picture_file, native):
    with vision_model.session(pykvedge.plan("lookm")) as session:
        answer = session.ask("What is this?", [picture_file()], SHORT)
        pieces = list(answer)
        assert "".join(pieces) == answer.report.text and len(pieces) > 1
        assert answer.report.finish in ("length", "end")
        assert session.last_report is answer.report


def test_what_is_kept_is_what_the_plan_says(vision_model, picture_file, native):
    plan = pykvedge.plan("lookm", 0.25)
    with vision_model.session(plan) as session:
        report = say(session, WORDS, [picture_file()])
        n = plan.count(report.tokens.prompt)
        assert report.kv.kept_per_layer == [n, n] and report.kv.kept_of_them == n
        generated = report.tokens.generated - len(session.pending)
        assert all(length == n + generated for heads in session.engine.cache.lengths() for length in heads)
        stats = session.engine.cache.stats()
        assert stats.n_tokens == report.tokens.prompt + generated and stats.n_image_tokens == report.tokens.image
        assert stats.n_compressions == 1


def test_a_chat_of_several_turns_extends_the_compressed_cache(vision_model, picture_file, native):
    plan = pykvedge.plan("lookm", 0.3)
    with vision_model.session(plan) as session:
        first = say(session, WORDS, [picture_file()])
        second = say(session, "And what else is there to see in it?")
        assert second.tokens.prompt < first.tokens.prompt and second.tokens.image == 0
        assert second.kv.compressed_tokens == second.tokens.prompt + first.tokens.generated - 1
        assert second.kv.kept_of_them == max(32, plan.count(second.kv.compressed_tokens)) < second.kv.compressed_tokens
        assert session.engine.cache.stats().n_compressions == 2
        generated = second.tokens.generated - len(session.pending)
        kept = plan.count(first.tokens.prompt) + second.kv.kept_of_them
        assert session.engine.pairs_held() == kept + generated
        third = say(session, "Look at this too.", [picture_file("b.png", 90, 90)])
        assert third.tokens.image > 0
        assert [m.role for m in session.messages] == ["user", "assistant"] * 3
        assert session.engine.context.at.n_cells == session.engine.cache.stats().n_tokens


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("method", ["kvedge", "elastic", "prefixkv"])
def test_what_a_policy_leaves_of_an_answer_is_not_kept_of_the_next_message(vision_model, picture_file, method, bounded):
    plan = pykvedge.plan(method, 0.3)
    with vision_model.session(plan, bounded=bounded) as session:
        first = say(session, WORDS, [picture_file()])
        for question in ("And what else is there to see in it?", "Hm?"):
            second = say(session, question)
            answer = 0 if plan.drops else first.tokens.generated - 1
            assert second.kv.compressed_tokens == second.tokens.prompt + answer
            assert second.kv.kept_of_them == min(max(32, plan.count(second.kv.compressed_tokens)),
                                                 second.kv.compressed_tokens)  # fmt: skip
            first = second


@pytest.mark.parametrize("kind", ["llama", "qwen2vl", "gemma3", "lfm2"])
def test_nothing_is_lost_between_turns_when_everything_is_kept(tiny, kind, native, tokens):
    """Two turns end with the logits of the same tokens read at once."""
    with tiny(kind).session() as by_turns:
        by_turns.ask("What is this?", sampling=Sampling(max_tokens=6)).read()
        by_turns.ask("And what else?", sampling=Sampling(max_tokens=1))
        context = by_turns.engine.context
        assert context.at.n_cells == len(tokens) == by_turns.engine.cache.stats().n_tokens
        expected = by_turns.engine.context.logits().copy()
    read = [TextPiece([*tokens])]
    with tiny(kind).session() as at_once:
        at_once.engine.make_room(read, at_once.plan)
        at_once.engine.prefill(read, silent, None)
        np.testing.assert_allclose(at_once.engine.context.logits(), expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("images", [0, 1])
def test_a_conversation_begins_with_one_bos_and_later_turns_with_none(tiny, picture_file, native, tokens, images):
    with tiny("llava").session() as session:
        bos = session.model.llama.llama_vocab_bos(session.model.vocab)
        say(session, "Hello", [picture_file()] * images, Sampling(max_tokens=2))
        say(session, "Again", [picture_file()] * images, Sampling(max_tokens=2))
    assert tokens[0] == bos and tokens.count(bos) == 1


def test_positions_go_on_from_the_original_prompt(vision_model, picture_file, native):
    with vision_model.session(pykvedge.plan("streaming-llm", 0.1)) as compressed, vision_model.session() as full:
        for session in (compressed, full):
            say(session, WORDS, [picture_file()], Sampling(max_tokens=3))
        assert compressed.engine.context.at.n_past == full.engine.context.at.n_past
        assert compressed.engine.cache.stats().n_tokens == full.engine.context.at.n_cells


def test_an_answer_that_is_broken_off_stays_as_far_as_it_went(tiny, native):
    with tiny("llama").session(pykvedge.plan("h2o")) as session:
        answer = session.ask("Hello", sampling=Sampling(max_tokens=200))
        next(answer)
        answer.close()
        assert answer.report.finish == "cancelled" and list(answer) == []
        assert session.messages[-1].text == answer.report.text
        assert say(session, "Go on").text  # the next turn first reads the pending token
        session.ask("Once more", sampling=SHORT)  # the answer is never read
        assert say(session, "Still there?").text
        assert [m.role for m in session.messages] == ["user", "assistant"] * 4


def test_cancelling_stops_an_answer_and_a_prompt(tiny, native):
    cancel = threading.Event()
    with tiny("llama").session(pykvedge.plan("h2o"), cancel=cancel) as session:
        answer = session.ask("Hello", sampling=Sampling(max_tokens=500))
        next(answer)
        cancel.set()
        answer.read()
        assert answer.report.finish == "cancelled" and answer.report.tokens.generated < 500
        with pytest.raises(CancelledError):
            session.ask(WORDS)
        cancel.clear()
        assert len(session.messages) == 2  # an unread message is not in the conversation
        assert say(session, "Again").text


def test_the_method_may_change_between_turns(tiny, native):
    with tiny("llama").session(pykvedge.plan("full")) as session:
        first = say(session, WORDS)
        assert first.kv.kept_of_them == first.tokens.prompt
        session.set_plan(pykvedge.plan("h2o", 0.5))
        second = say(session, WORDS)
        assert second.method == "h2o" and second.kv.kept_of_them == second.kv.compressed_tokens // 2


def test_clear_starts_anew(tiny, picture_file, native):
    with tiny("llava").session(pykvedge.plan("lookm")) as session:
        first = say(session, "What is this?", [picture_file()])
        say(session, "And?")
        session.clear()
        assert session.messages == [] and session.last_report is None
        again = say(session, "What is this?", [picture_file()])
        assert again.text == first.text and again.tokens == first.tokens


def test_long_prompts_get_a_context_that_holds_them(tiny, native):
    with tiny("llama", n_ctx_train=6000).session(pykvedge.plan("h2o")) as session:
        report = say(session, "ab " * 2200, sampling=Sampling(max_tokens=2))
        assert 4096 < report.tokens.prompt < session.engine.context.n_ctx <= 6144
    with tiny("llama", n_ctx_train=6000).session() as session, pytest.raises(ContextError, match="training length"):
        session.ask("ab " * 5000)


def test_a_recent_window_larger_than_a_short_second_turn_is_no_error(tiny, native):
    with tiny("llama").session(pykvedge.plan("h2o", 0.2, recent=16)) as session:
        say(session, WORDS)
        second = say(session, "Hm? " * 10).kv
        assert 32 == second.kept_of_them < second.compressed_tokens


def test_models_that_cannot_be_compressed(tiny, native):
    with tiny("mamba").session() as session:
        assert say(session, "Hello").text
        with pytest.raises(NothingToCompressError):
            session.set_plan(pykvedge.plan("lookm"))
        assert say(session, "Still there?").text
    with tiny("mamba").session(pykvedge.plan("lookm")) as session, pytest.raises(NothingToCompressError):
        session.ask("Hello")


def test_settings_are_checked(tiny):
    model = tiny("llama").model
    with pytest.raises(UnknownNameError, match="did you mean 'threads'"):
        Session(model, thread=2)
    for bad in ({"n_ctx": -1}, {"threads": 1000}, {"gpu_layers": -3}, {"kv_type": "q9_9"}, {"n_ctx": True}):
        with pytest.raises(UsageError):
            Session(model, **bad)


def test_a_closed_session_says_so(tiny, native):
    session = tiny("llama").session()
    say(session, "Hello")
    session.close()
    session.close()
    with pytest.raises(StateError, match="closed"):
        session.ask("Hello")


def test_progress_is_reported(tiny, picture_file, native):
    seen = []
    with tiny("llava").session(
        pykvedge.plan("lookm"), progress=lambda what, share: seen.append((what, share))
    ) as session:
        say(session, "What is this?", [picture_file()])
    names = list(dict.fromkeys(what for what, _ in seen))
    assert names[0] == "loading the model" and names[-1] == "reading the prompt"
    assert "encoding image 1 of 1" in names and all(0 <= share <= 1 for _, share in seen)


def test_characters_that_span_tokens_come_out_whole(tiny):
    with tiny("llama").session() as session:
        model, text = session.model, "naïve 図 🦙"
        stream = TextStream(model)
        pieces = [stream.feed(token) for token in model.tokenize(text)]
        assert ("".join(pieces) + stream.finish()).strip() == text
        assert all("\ufffd" not in piece for piece in pieces)
        broken = TextStream(model)
        for token in model.tokenize("図"):
            if model.piece(token)[0] >= 0x80:
                broken.feed(token)
                assert broken.finish() == "\ufffd"
                break
