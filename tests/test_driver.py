"""eval and bench measure what a session does: of a prompt, they keep the tokens that a session keeps."""

import threading

import pytest
from attached import held
from choosing import whole
from conftest import THREADS

import pykvedge
from kvedge_lab.bench.matrix import Shape, Variant
from kvedge_lab.bench.measure import Loaded, Prompt, repetition
from kvedge_lab.eval.reader import Reader
from pykvedge.library.libkvedge import Cache
from pykvedge.models.vision import ImagePiece

WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. "


@pytest.mark.parametrize("method", ["lookm", "pyramidkv", *whole("snapkv", "elastic")])
def test_eval_and_bench_keep_what_a_session_keeps(tiny, picture_file, native, monkeypatch, method):
    """A prompt of several batches with an image in its middle."""
    plan, seen = pykvedge.plan(method, 0.3), {}
    with tiny("llava").session(plan, n_ctx=4096) as session:
        question = WORDS * 30 + "<image>" + WORDS * 30
        pieces = session.first_prompt(question, [picture_file()])
        n = sum(p.n_tokens for p in pieces)
        assert n > 2 * 512
        session.ask(question, [picture_file()], pykvedge.Sampling(temp=0, max_tokens=1)).read()
        seen["session"] = held(session.engine.cache)
        for piece in pieces:
            if isinstance(piece, ImagePiece):
                session._vision.encode(piece)

        reader = Reader(session.model, session._vision, THREADS, "f16")
        reader.make_room(n, 8, 0)
        reader.start(plan)
        reader.read(pieces)
        reader.compress()
        seen["eval"] = held(reader._driver.cache)
        reader.close()

        detach = Cache.detach

        def looked_at(cache):
            if cache.attached:
                seen["bench"] = held(cache)
            detach(cache)

        monkeypatch.setattr(Cache, "detach", looked_at)
        prompt = Prompt(Shape(n), pieces, [])
        loaded = Loaded(session.model, session._vision, THREADS, threading.Event())
        repetition(loaded, prompt, Variant(method, plan))
        session.release(pieces)
    assert seen["session"] == seen["eval"] == seen["bench"]
