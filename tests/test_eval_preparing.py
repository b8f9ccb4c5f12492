"""Samples become tokens or are refused. In both cases, all memory of mtmd is released."""

from dataclasses import replace

import pytest
from conftest import THREADS

import pykvedge
from kvedge_lab.eval.measure import CONTEXT, PROMPT, Preparer
from kvedge_lab.eval.tasks import DialogMessage, Sample, demo_samples
from pykvedge.errors import ContextError, ImageError, KvedgeError
from pykvedge.models.composer import Composer
from pykvedge.models.vision import ImagePiece, Vision
from pykvedge.system.files import DATA


@pytest.fixture(scope="module")
def session(native):
    with pykvedge.Session(DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf", threads=THREADS) as made:
        yield made


@pytest.fixture
def split(monkeypatch):
    """Collects all pieces of images; each is mtmd's memory until it is released."""
    made, plain = [], Vision.split

    def noting(self, text, pictures):
        pieces = plain(self, text, pictures)
        made.extend(piece for piece in pieces if isinstance(piece, ImagePiece))
        return pieces

    monkeypatch.setattr(Vision, "split", noting)
    return made


@pytest.fixture
def two_turns(picture_file):
    """A sample with an image in each of its two questions."""
    first, second = picture_file("a.png", 240, 240), picture_file("b.png", 240, 240, mode="L")
    asked, answer = DialogMessage("user", "What?", (first,)), DialogMessage("assistant", "A scene.")
    return Sample("two", "test", (asked, answer, DialogMessage("user", "And this?", (second,))), "Another one.")


def test_a_sample_holds_its_images_until_it_is_released(session, split, two_turns):
    preparer = Preparer(session.model, session._vision)
    prepared = preparer.prepare(two_turns)
    assert len(split) == len(prepared.images) == 2 and all(piece.chunk for piece in split)
    preparer.release(prepared.turns)
    assert not any(piece.chunk for piece in split)


def test_a_failing_encoder_leaves_nothing(session, split, two_turns, monkeypatch):
    encode, encoded = Vision.encode, []

    def once(self, piece, look):
        encoded.append(piece)
        if len(encoded) == 2:
            raise ImageError("the second image cannot be encoded")
        encode(self, piece, look)

    monkeypatch.setattr(Vision, "encode", once)
    with pytest.raises(ImageError, match="the second image"):
        Preparer(session.model, session._vision).prepare(two_turns)
    assert len(split) == 2 and not any(piece.chunk for piece in split)


def test_a_refused_reply_leaves_nothing(session, split, two_turns, monkeypatch):
    def refused(self, prompt, reply):
        raise KvedgeError(f"no tokens for {reply}")

    monkeypatch.setattr(Composer, "reply", refused)
    with pytest.raises(KvedgeError, match="no tokens"):
        Preparer(session.model, session._vision).prepare(two_turns)
    assert not any(piece.chunk for piece in split)


def test_a_refused_question_about_a_context_leaves_nothing(session, split, two_turns, monkeypatch):
    monkeypatch.setattr("pykvedge.runtime.opening.cut", lambda pieces: ([], pieces))
    alone = replace(two_turns, lines=two_turns.lines[-1:])
    with pytest.raises(ContextError, match="has no text or image before its question"):
        Preparer(session.model, session._vision, compress=CONTEXT).prepare(alone)
    assert len(split) == 1 and not split[0].chunk


@pytest.mark.parametrize("compress", [PROMPT, CONTEXT])
def test_samples_of_one_context_go_together(session, split, compress):
    first, second = (replace(one, context="c") for one in demo_samples("code", 2, 5, 4))
    broken = replace(second, lines=(replace(second.lines[0], images=(DATA / "none.png",)),))
    preparer = Preparer(session.model, session._vision, compress=compress)
    with pytest.raises(ImageError, match=r"none\.png"):
        preparer.prepare_all([first, broken])
    assert split and not any(piece.chunk for piece in split)
