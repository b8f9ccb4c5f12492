"""What happens to a request's pictures before it gets a slot: who finds them encoded, and what C holds later."""

import threading
import time

import pytest
from server import DEMO, SCENES

import pykvedge
from pykvedge.errors import CancelledError, ContextError, GrammarError
from pykvedge.models.prompt import IMAGE, Message
from pykvedge.runtime.sampling import Sampling
from pykvedge.serve.job import Done, Failed, Limits, Request
from pykvedge.serve.parked import Park
from pykvedge.serve.scheduler import Scheduler


@pytest.fixture(scope="module")
def loaded(native):
    with pykvedge.load(DEMO / "demo-model.gguf", DEMO / "demo-mmproj.gguf", threads=1) as model:
        yield model


def asked(engine, cancel=False, **fields):
    """Asks about a picture, and returns the last event."""
    over, last = threading.Event(), []
    submitted = threading.Event()

    def take(event):
        if cancel and submitted.wait(20):
            job.cancelled.set()
        if isinstance(event, (Done, Failed)):
            last.append(event)
            over.set()

    scenes = fields.pop("scenes", SCENES[:1])
    said = f"{IMAGE}\n" * len(scenes) + fields.pop("text", "What is there?")
    sampling = fields.pop("sampling", Sampling(max_tokens=2, temp=0.0))
    messages = [Message("user", said, [pykvedge.load_picture(scene) for scene in scenes])]
    request = Request(messages, pykvedge.plan("lookm", 0.3), sampling, **fields)
    job = engine.submit(request, take)
    submitted.set()
    assert over.wait(60)
    return last[0]


@pytest.mark.parametrize("share", [False, True])
def test_pictures_of_another_key_are_encoded_again(loaded, monkeypatch, share):
    engine = Scheduler(loaded, Limits(slots=2, n_ctx=1024, memory=64 << 20, share_prompts=share), Park(None))
    encoder, encoded = engine.preparer.vision.encoder, []
    plain = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda *given: encoded.append(1) or plain(*given), raising=False)
    engine.preparer.vision._encoded.clear()
    try:
        for owner, text in (("ann", "a"), ("ann", "b"), ("bob", "a"), ("bob", "c")):
            assert isinstance(asked(engine, owner=owner, text=text), Done)
        assert len(encoded) == (1 if share else 2)
    finally:
        engine.close()


def test_nobody_waits_for_the_pictures_of_somebody_else(loaded, monkeypatch):
    engine = Scheduler(loaded, Limits(slots=2, n_ctx=1024, memory=64 << 20), Park(None))
    encoder, begun, go_on = engine.preparer.vision.encoder, threading.Event(), threading.Event()
    plain, ends, over = encoder.encode, [], threading.Event()

    def slow(*given):
        begun.set()
        assert go_on.wait(60)
        return plain(*given)

    monkeypatch.setattr(encoder, "encode", slow, raising=False)
    engine.preparer.vision._encoded.clear()
    try:
        first = threading.Thread(target=lambda: ends.append(asked(engine, text="first")))
        first.start()
        assert begun.wait(60)
        request = Request([Message("user", "Hi")], pykvedge.plan("lookm", 0.3), Sampling(max_tokens=2))
        engine.submit(request, lambda event: over.set() if isinstance(event, Done) else None)
        assert over.wait(60) and not ends
        go_on.set()
        first.join(60)
        assert isinstance(ends[0], Done)
    finally:
        go_on.set()
        engine.close()


def test_pictures_of_two_requests_take_turns(loaded, monkeypatch):
    """A request of four pictures is at the encoder; the one picture of another comes behind its first."""
    engine = Scheduler(loaded, Limits(slots=2, n_ctx=1024, memory=64 << 20), Park(None))
    encoder, order, begun = engine.preparer.vision.encoder, [], threading.Event()
    run = encoder._watch.run

    def watched(*given):
        order.append(threading.current_thread().name)
        begun.set()
        end = time.monotonic() + 60
        while len(order) == 1 and not encoder._next.locked() and time.monotonic() < end:
            time.sleep(0.01)  # until the other waits
        return run(*given)

    monkeypatch.setattr(encoder._watch, "run", watched)
    engine.preparer.vision._encoded.clear()
    ends = []
    first = threading.Thread(target=lambda: ends.append(asked(engine, scenes=SCENES[:4], owner="ann")))
    try:
        first.start()
        assert begun.wait(60)
        ends.append(asked(engine, owner="bob"))
        first.join(60)
        assert all(isinstance(end, Done) for end in ends)
        a, b, *others = order
        assert a != b and others == [a] * 3
    finally:
        engine.close()


def test_a_prompt_that_is_too_long_is_refused_before_its_pictures_are_encoded(loaded, monkeypatch):
    engine = Scheduler(loaded, Limits(slots=1, n_ctx=150, memory=64 << 20), Park(None))
    monkeypatch.setattr(engine.preparer.vision, "encode", lambda *given: pytest.fail("encoded"))
    try:
        end = asked(engine)
        assert isinstance(end, Failed) and "exceeds the available context size (150)" in str(end.error)
    finally:
        engine.close()


def test_requests_that_are_refused_leave_nothing_in_c(loaded, monkeypatch):
    """As many of mtmd's chunks are freed as were made, whyever the request ends."""
    engine = Scheduler(loaded, Limits(slots=1, n_ctx=170, memory=64 << 20), Park(None))
    mtmd, made, freed = engine.preparer.vision.mtmd, [], []
    copy, free = mtmd.mtmd_input_chunk_copy, mtmd.mtmd_input_chunk_free
    monkeypatch.setattr(mtmd, "mtmd_input_chunk_copy", lambda chunk: made.append(1) or copy(chunk))
    monkeypatch.setattr(mtmd, "mtmd_input_chunk_free", lambda chunk: freed.append(1) or free(chunk))
    ends = [
        ({}, Done), ({"text": "word " * 60}, ContextError), ({"text": "word " * 61}, ContextError),
        ({"count_only": True}, Done), ({"cancel": True, "text": "x"}, CancelledError),
        ({"sampling": Sampling(max_tokens=2, grammar="root ::= ("), "text": "y"}, GrammarError),
    ]  # fmt: skip
    try:
        for n, (fields, how) in enumerate(ends, 1):
            end = asked(engine, **fields)
            assert isinstance(end.error if isinstance(end, Failed) else end, how), end
            assert len(made) == len(freed) == n
    finally:
        engine.close()
