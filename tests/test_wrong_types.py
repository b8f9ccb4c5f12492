"""Values of wrong types in Python: a UsageError in one line, without any effect."""

from dataclasses import fields

import numpy as np
import pytest

import pykvedge
from pykvedge.errors import KvedgeError, UsageError
from pykvedge.runtime.settings import LoadSettings, Settings

WRONG = [5, "x", b"x", [5], {}, 1.5, object(), len]
SHORT = pykvedge.Sampling(max_tokens=1)
ROWS = np.zeros((1, 2, 64, 32), np.float32)


@pytest.fixture(scope="module")
def model(tiny):
    with pykvedge.load(tiny("llama").model, threads=1) as model:
        yield model


@pytest.fixture
def session(model, native):
    with pykvedge.Session(model) as session:
        session.ask("Hello", sampling=SHORT).read()
        yield session


def refused(call, *right):
    """Calls `call` with every value of a wrong type. right: the allowed types."""
    for wrong in WRONG:
        if not isinstance(wrong, right or ()):
            with pytest.raises(KvedgeError, match=r"^[^\n]+$"):
                call(wrong)


def test_sessions(model):
    refused(pykvedge.Session)
    for name in ("plan", "cancel"):
        refused(lambda wrong, name=name: pykvedge.Session(model, **{name: wrong}))
    refused(lambda wrong: pykvedge.Session(model, progress=wrong), type(len))
    refused(lambda wrong: pykvedge.load(model.path, cancel=wrong))
    assert model.open_sessions == 0


@pytest.mark.parametrize("name", [f.name for f in fields(Settings) if f.type == "bool"])
def test_settings_that_are_true_or_false(model, name):
    target = model.path if name in LoadSettings.__annotations__ else model
    for wrong in [*WRONG, None, 1, "no"]:
        with pytest.raises(UsageError, match=f"{name} must be True or False"):
            pykvedge.Session(target, **{name: wrong})


def test_profiles(model):
    refused(lambda wrong: pykvedge.Session(model, plan=pykvedge.plan("sparsemm"), profile=wrong))


def test_calls_of_a_session(session, tmp_path):
    refused(session.ask, str)
    refused(lambda wrong: session.ask("Hello", sampling=wrong))
    refused(session.set_plan)
    refused(session.save, str, bytes)
    refused(session.load)
    refused(lambda wrong: session.fork(wrong))
    refused(lambda wrong: session.fork(cancel=wrong))
    refused(lambda wrong: session.examine("Hello", [], wrong))
    for call in (session.save, session.load):
        with pytest.raises(UsageError, match="must be a path, not None"):
            call(None)
    session.ask("Hello", sampling=SHORT).read()
    session.save(tmp_path / "a.kvs")
    refused(lambda wrong: session.load(tmp_path / "a.kvs", wrong))
    assert session.in_cache and session.messages


def test_paths_in_bytes(session, tmp_path):
    path = bytes(tmp_path / "a.kvs")
    assert session.save(path) == (tmp_path / "a.kvs").stat().st_size
    messages = len(session.messages)
    session.clear()
    session.load(path)
    assert len(session.messages) == messages


def test_plans():
    refused(pykvedge.plan)
    refused(pykvedge.Plan.from_json)


def test_arrays():
    plan = pykvedge.plan("knorm", 0.5)
    refused(lambda wrong: pykvedge.compress(wrong, ROWS, ROWS, ROWS))
    refused(lambda wrong: pykvedge.compress(plan, wrong, ROWS, ROWS))
    refused(lambda wrong: pykvedge.compress(plan, ROWS, ROWS, ROWS, engine=wrong))
    refused(lambda wrong: pykvedge.compress(plan, ROWS, ROWS, ROWS, threads=wrong), int)
    refused(lambda wrong: pykvedge.compress(plan, ROWS, ROWS, ROWS, stream=wrong), int)
    with pytest.raises(UsageError, match="unknown option 'thread'; did you mean 'threads'"):
        pykvedge.compress(plan, ROWS, ROWS, ROWS, thread=1)


def test_videos():
    refused(lambda wrong: next(pykvedge.frames(wrong)))
    refused(lambda wrong: next(pykvedge.pages(wrong)))
    refused(lambda wrong: next(pykvedge.pages(b"%PDF-", wrong)))
