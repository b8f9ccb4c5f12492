"""A request's pictures before it gets a slot: reuse of encoded pictures, and memory in C."""

import threading
import time

import pytest
from scheduled_job import ScheduledJob
from server import SCENES

import pykvedge
from pykvedge import CancelledError, ContextError, GrammarError, Sampling
from pykvedge.models.prompt import IMAGE, Message
from pykvedge.serve.job import Done, Failed, Request


def asked(engine, cancel=False, **fields):
    """Asks about a picture, and returns the last event."""
    scenes = fields.pop("scenes", SCENES[:1])
    said = f"{IMAGE}\n" * len(scenes) + fields.pop("text", "What is there?")
    sampling = fields.pop("sampling", Sampling(max_tokens=2, temp=0.0))
    messages = [Message("user", said, [pykvedge.load_picture(scene) for scene in scenes])]
    request = Request(messages, pykvedge.plan("lookm", 0.3), sampling, **fields)
    return ScheduledJob(engine, request, lambda event: cancel).wait()


@pytest.mark.parametrize("share", [False, True])
def test_pictures_of_another_key_are_encoded_again(scheduled, monkeypatch, share):
    engine = scheduled(share_prompts=share)
    encoder, encoded = engine.preparer.vision.encoder, []
    plain = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda *given: encoded.append(1) or plain(*given), raising=False)
    engine.preparer.vision._encoded.memory.clear()
    for owner, text in (("ann", "a"), ("ann", "b"), ("bob", "a"), ("bob", "c")):
        assert isinstance(asked(engine, owner=owner, text=text), Done)
    assert len(encoded) == (1 if share else 2)


def test_nobody_waits_for_the_pictures_of_somebody_else(scheduled, monkeypatch):
    engine = scheduled()
    encoder, begun, go_on = engine.preparer.vision.encoder, threading.Event(), threading.Event()
    plain, ends, over = encoder.encode, [], threading.Event()

    def slow(*given):
        begun.set()
        assert go_on.wait(60)
        return plain(*given)

    monkeypatch.setattr(encoder, "encode", slow, raising=False)
    engine.preparer.vision._encoded.memory.clear()
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


def test_pictures_of_two_requests_take_turns(scheduled, monkeypatch):
    """While a request of four pictures is being encoded, the picture of another request comes after its first."""
    engine = scheduled()
    encoder, order, begun = engine.preparer.vision.encoder, [], threading.Event()
    run = encoder._watch.run

    def watched(*given):
        order.append(threading.current_thread().name)
        begun.set()
        end = time.monotonic() + 60
        while len(order) == 1 and not encoder._next.locked() and time.monotonic() < end:
            time.sleep(0.01)  # until the other request waits
        return run(*given)

    monkeypatch.setattr(encoder._watch, "run", watched)
    engine.preparer.vision._encoded.memory.clear()
    ends = []
    first = threading.Thread(target=lambda: ends.append(asked(engine, scenes=SCENES[:4], owner="ann")))
    first.start()
    assert begun.wait(60)
    ends.append(asked(engine, owner="bob"))
    first.join(60)
    assert all(isinstance(end, Done) for end in ends)
    a, b, *others = order
    assert a != b and others == [a] * 3


def test_a_prompt_that_is_too_long_is_refused_before_its_pictures_are_encoded(scheduled, monkeypatch):
    engine = scheduled(slots=1, n_ctx=150)
    monkeypatch.setattr(engine.preparer.vision, "encode", lambda *given: pytest.fail("encoded"))
    end = asked(engine)
    assert isinstance(end, Failed) and "exceeds the available context size (150)" in str(end.error)


def test_requests_that_are_refused_leave_nothing_in_c(scheduled, monkeypatch):
    """Every mtmd chunk that is made is freed, however the request ends."""
    engine = scheduled(slots=1, n_ctx=170)
    mtmd, made, freed = engine.preparer.vision.mtmd, [], []
    copy, free = mtmd.mtmd_input_chunk_copy, mtmd.mtmd_input_chunk_free
    monkeypatch.setattr(mtmd, "mtmd_input_chunk_copy", lambda chunk: made.append(1) or copy(chunk))
    monkeypatch.setattr(mtmd, "mtmd_input_chunk_free", lambda chunk: freed.append(1) or free(chunk))
    ends = [
        ({}, Done), ({"text": "word " * 60}, ContextError), ({"text": "word " * 61}, ContextError),
        ({"count_only": True}, Done), ({"cancel": True, "text": "x"}, CancelledError),
        ({"sampling": Sampling(max_tokens=2, grammar="root ::= ("), "text": "y"}, GrammarError),
    ]  # fmt: skip
    for n, (fields, how) in enumerate(ends, 1):
        end = asked(engine, **fields)
        assert isinstance(end.error if isinstance(end, Failed) else end, how), end
        assert len(made) == len(freed) == n
