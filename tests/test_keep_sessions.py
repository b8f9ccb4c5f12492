"""Sessions with whole rows: images, second passes, undone messages, and Ctrl-C."""

import os
import signal
import sys
import threading

import numpy as np
import pytest
from attached import held, profiles
from choosing import whole
from conversations import WORDS, say

import pykvedge
from pykvedge import CancelledError, Sampling, UsageError
from pykvedge.library import libkvedge
from pykvedge.models.model import silent
from pykvedge.models.vision import TextPiece, Vision
from pykvedge.runtime.sequence import Sequence

SHORT = Sampling(max_tokens=6)
TEXTS = (WORDS, "And what then?", "Say it again, please. " * 4, "Why?")


def rows(session):
    cache = session.engine.cache
    return [libkvedge.rows(cache, i, h) for i, heads in enumerate(cache.lengths()) for h in range(len(heads))]


def same(a, b) -> bool:
    """Returns whether two sessions hold the same pairs. Shared rows are copied first, so rounding may differ."""
    if held(a.engine.cache) != held(b.engine.cache):
        return False
    pairs = zip(rows(a), rows(b), strict=True)
    return all(np.allclose(x, y, rtol=0, atol=1e-3) for one, two in pairs for x, y in zip(one, two, strict=True))


@pytest.fixture
def passages(monkeypatch):
    """Records what sequences read, piece by piece, with repeated answers before their messages. Keeps the pictures."""
    read, freed, steps, release = [], [], Sequence._steps, Vision.release

    def noting(self, pieces, want_logits, note):
        if note:
            read.extend(TextPiece(list(p.tokens)) if isinstance(p, TextPiece) else p for p in pieces)
        return steps(self, pieces, want_logits, note)

    with monkeypatch.context() as patched:
        patched.setattr(Sequence, "_steps", noting)
        patched.setattr(Vision, "release", lambda self, pieces: freed.append((self, list(pieces))))
        yield read
    for vision, pieces in freed:
        release(vision, pieces)


CASES = [
    ("qwen2vl", "snapkv"), ("llama", "kvzip"), *whole(
        ("qwen2vl", "kvzip"), ("llava", "kvedge"), ("gemma3", "lookm"), ("llama", "kvzip-uniform"),
        ("qwen2vl", "kvedge"), ("llama", "expected"), ("qwen2vl", "h2o"), ("gemma3", "kvzip"), ("qwen3", "kvzip"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), CASES)
@pytest.mark.parametrize("keep", ["ram", *whole("disk")])
def test_pairs_are_those_of_one_prompt(tiny, picture_file, profile_file, passages, kind, method, keep):
    """Includes images, M-RoPE and second passes. The fresh session reads the whole prompt a second time at once."""
    files, plan = tiny(kind), pykvedge.plan(method, 0.3)
    given = {"profile": profiles(profile_file, files, method), "n_ctx": 4096}
    with files.session(plan, **given, keep=keep) as session, files.session(plan, **given) as fresh:
        for i, text in enumerate(TEXTS):
            images = [picture_file()] if files.mmproj and i in (0, 2) else []
            report = say(session, text, images, SHORT)
            assert report.kv.whole_bytes > 0 and not report.notes
            so_far = list(passages)
            fresh.forget()
            fresh.engine.make_room(so_far, plan)
            fresh.engine.encode(so_far, silent, None)
            fresh.engine.prefill(so_far, silent, None)
            fresh.engine.compress()
            del passages[len(so_far) :]
            n = sum(piece.n_tokens for piece in so_far)
            kept = [[[t for t in head if t < n] for head in heads] for heads in held(session.engine.cache)]
            assert kept == held(fresh.engine.cache), (i, n)
            for (k, v), (k_fresh, v_fresh) in zip(rows(session), rows(fresh), strict=True):
                # rows of a file are copied first: other blocks, so sums of attention have another order
                near = {"rtol": 0, "atol": 0 if keep == "ram" else 1e-3}
                np.testing.assert_allclose(k[: len(k_fresh)], k_fresh, **near)
                np.testing.assert_allclose(v[: len(v_fresh)], v_fresh, **near)


def test_a_method_of_a_second_pass_goes_on_where_the_first_message_needed_none(native, tiny):
    """The budget held the first message, so nothing was scored then."""
    with tiny("llama").session(pykvedge.plan("kvzip-uniform", 150), keep="ram") as session:
        first = say(session, "Hello there.", sampling=SHORT)
        later = say(session, WORDS * 2, sampling=SHORT)
        assert first.kv.whole_bytes > 0 and later.kv.whole_bytes > 0 and not later.notes
        n = session.engine.cache.lengths()[0][0]
        assert 150 <= n <= 160 < session.engine.cache.stats().n_tokens


def kept(keep, folder):
    return {"keep": keep, "keep_folder": str(folder)} if keep == "disk" else {"keep": keep}


@pytest.mark.parametrize("keep", ["ram", "disk"])
@pytest.mark.parametrize("kind", ["qwen2vl", *whole("llama", "qwen3")])
def test_what_is_taken_back_leaves_nothing(native, tiny, picture_file, tmp_path, kind, keep):
    """After undo and retry, no cache has rows of the undone message."""
    files, plan = tiny(kind), pykvedge.plan("kvedge", 0.3)
    images = [picture_file()] if files.mmproj else []
    where = {**kept(keep, tmp_path), "n_ctx": 4096}
    with files.session(plan, undo=True, **where) as session, files.session(plan, **where) as straight:
        for turn in range(3):
            say(session, "What is wrong here? " * 9, images, SHORT)
            session.undo()
            report, expected = (say(s, TEXTS[turn], images[:1], SHORT) for s in (session, straight))
            assert report.text == expected.text and same(session, straight), turn
            again = session.retry(SHORT)
            assert again.read() == expected.text and same(session, straight), turn
            assert report.kv.whole_bytes > 0 and not report.notes and not again.report.notes


@pytest.mark.parametrize("keep", ["ram", "disk"])
@pytest.mark.parametrize("undo", [True, False])
def test_a_message_that_is_broken_off_is_dropped(native, tiny, picture_file, tmp_path, keep, undo):
    files, plan = tiny("qwen2vl"), pykvedge.plan("snapkv", 0.3)
    where = {**kept(keep, tmp_path), "n_ctx": 4096, "undo": undo}
    stop = threading.Event()

    def progress(what, share):
        if stop.is_set() and what == "reading the prompt" and 0 < share < 1:
            session.cancel.set()

    with files.session(plan, progress=progress, **where) as session, files.session(plan, **where) as straight:
        session.cancel = threading.Event()
        for s in (session, straight):
            say(s, WORDS, [picture_file()], SHORT)
        stop.set()
        with pytest.raises(CancelledError):
            session.ask("This is never read. " * 200, [picture_file()], SHORT)
        stop.clear()
        session.cancel.clear()
        reports = [say(s, "And what then?", sampling=SHORT) for s in (session, straight)]
        assert all(report.kv.whole_bytes > 0 and not report.notes for report in reports)
        if undo:  # without undo, the conversation is read again from its text
            assert reports[0].text == reports[1].text and same(session, straight)
        assert session.engine.cache.stats().n_compressions > 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("keep", ["ram", "disk"])
def test_ctrl_c_while_a_message_is_read(native, tiny, tmp_path, keep):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    where = {**kept(keep, tmp_path), "n_ctx": 4096, "undo": True}
    pressed = []

    def progress(what, share):
        if pressed == [False] and what == "reading the prompt" and 0 < share < 1:
            pressed[0] = True
            os.kill(os.getpid(), signal.SIGINT)

    try:
        plan = pykvedge.plan("snapkv", 0.3)
        files = tiny("llama")
        with files.session(plan, progress=progress, **where) as session, files.session(plan, **where) as straight:
            for s in (session, straight):
                say(s, WORDS, sampling=SHORT)
            pressed.append(False)
            with pytest.raises(KeyboardInterrupt):
                session.ask("This is never read. " * 150, sampling=SHORT)
            assert pressed == [True]
            texts = [say(s, "And what then?", sampling=SHORT).text for s in (session, straight)]
            assert texts[0] == texts[1] and same(session, straight)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("dropping", ["stream", "bounded"])
def test_what_drops_rows_for_good_keeps_none(tiny, native, dropping):
    with pytest.raises(UsageError, match="drop KV rows for good"):
        tiny("llama").session(keep="ram", **{dropping: True})
