"""Undo: a conversation after an undo equals a conversation without the undone message, bit for bit."""

import threading

import numpy as np
import pytest
from choosing import whole
from conversations import PLANS, SHORT, WORDS, a_plan, say

import pykvedge
from pykvedge import CancelledError, ContextError, Sampling, StateError, UsageError
from pykvedge.library import libkvedge
from pykvedge.runtime.report import DeviceWork

OTHER = "Something else altogether, which the conversation is better off without. " * 3


def kept(session):
    """Returns the content of the cache: tokens, keys and values of every layer and head."""
    cache = session.engine.cache
    out = []
    for layer, heads in enumerate(cache.lengths()):
        for head in range(len(heads)):
            out.append((cache.tokens(layer, head), *(x.tobytes() for x in libkvedge.rows(cache, layer, head))))
    return out


def place(session):
    context = session.engine.context
    return context.at.n_past, context.at.n_cells, session.pending, [(m.role, m.text) for m in session.messages]


def same(undone, never):
    assert place(undone) == place(never)
    if never.engine.cache is not None:
        assert kept(undone) == kept(never)


def logits_after(session, text, images=()):
    session.ask(text, images, Sampling(max_tokens=1)).read()
    return session.engine.context.logits().copy()


def check(model, plan, pictures, words=WORDS, **settings):
    """Compares two conversations. The first has one more message and takes it back."""
    with model.session(plan, undo=True, **settings) as undone, model.session(plan, **settings) as never:
        for session in (undone, never):
            say(session, words, pictures[:1])
            say(session, "And what else is there?", sampling=Sampling(max_tokens=40))
        say(undone, OTHER, pictures[1:], Sampling(max_tokens=50))
        assert place(undone) != place(never)
        taken = undone.undo()
        assert (taken.text, len(taken.pictures)) == (OTHER, len(pictures[1:]))
        same(undone, never)
        reports = [say(session, "Look at this one, then. " * 4, pictures[1:]) for session in (undone, never)]
        assert reports[0].text == reports[1].text and reports[0].tokens == reports[1].tokens
        assert reports[0].kv.kept_of_them == reports[1].kv.kept_of_them
        same(undone, never)
        np.testing.assert_array_equal(*(logits_after(session, "Why?") for session in (undone, never)))
        same(undone, never)


@pytest.mark.parametrize("name", PLANS)
def test_what_follows_is_as_if_the_message_had_not_been(tiny, picture_file, native, name):
    check(tiny("llava"), a_plan(name), [picture_file(), picture_file("b.png", 90, 90)])


@pytest.mark.parametrize("method", ["roco", "flashcache", *whole("mixkv", "snapkv", "meda", "pyramidkv", "vnorm")])
def test_of_every_sort_of_scorer(tiny, picture_file, native, method):
    check(tiny("llava"), pykvedge.plan(method, 0.3), [picture_file()])


@pytest.mark.parametrize("kind", ["qwen2vl", "gemma3", "lfm2", "mamba", "deepseek2"])
def test_of_every_sort_of_model(tiny, picture_file, native, kind):
    """Several positions per token, windowed layers, recurrent layers, and models that kvedge does not change."""
    plain = kind in ("mamba", "deepseek2")
    pictures = [picture_file()] if tiny(kind).mmproj else []
    words = WORDS[:50] if kind == "gemma3" else WORDS  # see the test of windows below
    check(tiny(kind), pykvedge.plan("full" if plain else "lookm", None if plain else 0.3), pictures, words)


@pytest.mark.parametrize("settings", [{"kv_type": "q8_0"}, {"kv_type": "kivi2"}, {"bounded": True}], ids=str)
def test_of_other_storage_and_bounded_prompts(tiny, picture_file, native, settings):
    check(tiny("llava"), pykvedge.plan("lookm", 0.3), [picture_file()], **settings)


def test_the_first_message_leaves_nothing(tiny, native):
    with tiny("llama").session(pykvedge.plan("h2o"), system="Be brief.") as session:
        first = say(session, WORDS)
        session.undo()
        assert session.messages == [] and not session.in_cache and session.last_report is None
        again = say(session, WORDS)
        assert (again.text, again.tokens) == (first.text, first.tokens)


def test_an_answer_that_goes_on_ends_there(tiny, native):
    with (
        tiny("llama").session(pykvedge.plan("h2o"), undo=True) as session,
        tiny("llama").session(pykvedge.plan("h2o")) as never,
    ):
        for s in (session, never):
            say(s, WORDS)
        next(session.ask(OTHER, sampling=Sampling(max_tokens=100)))
        session.undo()
        same(session, never)


def test_a_message_is_put_again_under_another_plan(tiny, picture_file, native):
    other = pykvedge.plan("snapkv", 0.6)
    with (
        tiny("llava").session(a_plan("merged"), undo=True) as session,
        tiny("llava").session(a_plan("merged")) as never,
    ):
        for s in (session, never):
            say(s, WORDS)
        before = say(session, OTHER, [picture_file()])
        again = session.retry(SHORT)
        assert again.read() == before.text and again.report.kv.kept_per_layer == before.kv.kept_per_layer
        session.set_plan(other)
        changed = session.retry(SHORT)
        changed.read()
        never.set_plan(other)
        assert say(never, OTHER, [picture_file()]).text == changed.report.text
        same(session, never)
        assert changed.report.kv.kept_per_layer != before.kv.kept_per_layer


def test_chance_draws_another_answer(tiny, native):
    with tiny("llama").session(undo=True) as session:
        say(session, "Hello")
        drawn = [say(session, "Go on", sampling=Sampling(temp=2.0, top_k=0, top_p=1.0, seed=1)).text]
        drawn += [session.retry(Sampling(temp=2.0, top_k=0, top_p=1.0, seed=n, max_tokens=20)).read() for n in (2, 3)]
        assert len(set(drawn)) == 3 and len(session.messages) == 4


def test_one_message_can_be_taken_back(tiny, native):
    with tiny("llama").session(pykvedge.plan("h2o"), undo=True) as session:
        with pytest.raises(StateError, match="no message"):
            session.undo()
        say(session, WORDS)
        say(session, "And?")
        session.undo()
        with pytest.raises(StateError, match="only the last message of this session"):
            session.undo()
        with pytest.raises(StateError, match="only the last message of this session"):
            session.retry()
        assert len(session.messages) == 2 and say(session, "Still there?").text


def test_without_the_setting_only_the_first_can(tiny, native):
    with tiny("llama").session(pykvedge.plan("h2o")) as session:
        say(session, WORDS)
        say(session, "And?")
        with pytest.raises(StateError, match="undo=True"):
            session.undo()
        assert len(session.messages) == 4


def test_a_stream_has_nothing_to_go_back_to(tiny, native):
    with pytest.raises(UsageError, match="stream and undo exclude each other"):
        tiny("llama").session(pykvedge.plan("h2o", 64), undo=True, stream=True)
    with tiny("llama").session(pykvedge.plan("h2o", 64), stream=True) as session:
        say(session, WORDS)
        with pytest.raises(StateError, match="a message of a stream cannot be undone"):
            session.undo()


def test_a_window_that_has_moved_on_is_not_shared(tiny, native):
    """Windowed layers do not have cells for two branches. The conversation goes on without undo."""
    with tiny("gemma3").session(pykvedge.plan("lookm", 0.3), undo=True, n_ctx=4096) as session:
        window = session.model.llama.llama_model_n_swa(session.model.handle)
        assert window > 0
        for _ in range(3):
            say(session, "word " * (window + 300), sampling=Sampling(max_tokens=3))
        with pytest.raises(StateError, match=f"a window of {window} tokens"):
            session.undo()
        assert say(session, "Still there?").text


def test_a_loaded_conversation_goes_back_to_what_was_loaded(saved):
    model, file = saved
    with model.session(undo=True) as session, model.session() as never:
        for s in (session, never):
            s.load(file)
        with pytest.raises(StateError, match="no message"):
            session.undo()
        say(session, OTHER)
        session.undo()
        same(session, never)
        assert say(session, "And?").text == say(never, "And?").text
        same(session, never)


def test_a_message_that_fails_costs_nothing(saved):
    """A loaded conversation has its pictures only in the cache: the copy restores it."""
    model, file = saved
    with model.session(undo=True, n_ctx=512) as session, model.session(n_ctx=512) as never:
        for s in (session, never):
            s.load(file)
        cancel = session.cancel = threading.Event()
        cancel.set()
        with pytest.raises(CancelledError):
            session.ask(OTHER)
        cancel.clear()
        same(session, never)
        with pytest.raises(ContextError, match="are free"):
            session.ask("word " * 600)
        same(session, never)
        assert say(session, "And?").text == say(never, "And?").text


def test_the_copy_takes_what_the_cache_takes_and_goes_with_the_conversation(tiny, native):
    with tiny("llama").session(pykvedge.plan("h2o", 0.2), undo=True) as session:
        say(session, WORDS * 5)
        assert session.undo_bytes == 0  # nothing to copy before the first message
        held = session.engine.cache.stats().bytes
        say(session, "And?")
        assert session.undo_bytes == held == session.engine.cache.stats(1).bytes
        session.undo()
        assert session.undo_bytes == 0
        assert session.engine.cache.stats(1).bytes == 0
        say(session, "And?")
        session.clear()
        assert session.undo_bytes == 0


def test_the_largest_size_stays_known_behind_an_undo(tiny, native):
    """A copy counts its own from when it was made."""
    with tiny("llama").session(pykvedge.plan("h2o", 0.2), undo=True) as session:
        first = say(session, WORDS * 20).kv
        largest = say(session, WORDS * 5).kv.peak_bytes
        session.undo()
        assert session.engine.cache.stats().bytes < first.kept_bytes * 2 < first.full_bytes <= largest
        answer = session.ask("And?", sampling=SHORT)
        assert answer.report.kv.peak_bytes == largest and answer.read()
        assert session.last_report.kv.peak_bytes == largest
        session.clear()
        assert say(session, "And?").kv.peak_bytes < largest


def test_a_retry_with_what_cannot_be_used_takes_nothing_back(tiny, native):
    with tiny("llama").session(a_plan("merged"), undo=True) as session:
        say(session, WORDS)
        before = place(session)
        for wrong in (5, Sampling(grammar="root ::= number"), Sampling(logit_bias={10**6: 1.0})):
            with pytest.raises(UsageError):
                session.retry(wrong)
        assert place(session) == before and session.retry(SHORT).read()


def test_a_retry_that_fails_is_put_again_by_the_next(tiny, picture_file, native):
    with tiny("llava").session(a_plan("merged"), undo=True) as session:
        say(session, WORDS)
        before = say(session, OTHER, [picture_file()])
        session.cancel = threading.Event()
        session.cancel.set()
        for _ in range(2):
            with pytest.raises(CancelledError):
                session.retry(SHORT)
        assert len(session.messages) == 2
        session.cancel.clear()
        assert session.retry(SHORT).read() == before.text and session.messages[-2].text == OTHER
        session.undo()
        say(session, "Something else")
        assert session.retry(SHORT).read() and session.messages[-2].text == "Something else"


def test_a_compression_after_an_undo_is_reported_as_one(tiny, native, monkeypatch):
    """The report has the device work of the message's compression. A copied sequence counts compressions from 0."""
    work = DeviceWork(compressed=True)
    monkeypatch.setattr("pykvedge.runtime.sequence.device_work", lambda cache, sequence: work)
    with tiny("llama").session(a_plan("merged"), undo=True) as session:
        for text in (WORDS, OTHER, OTHER):
            assert say(session, text).kv.device is work
        session.undo()
        assert say(session, OTHER).kv.device is work
