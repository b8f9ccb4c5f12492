"""One loaded model for several conversations: shared weights, the encoder in turns, and the order of closing."""

import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from threads import in_threads

import pykvedge
from pykvedge import CancelledError, Sampling, StateError, UsageError
from pykvedge.models.encoder import Encoder
from pykvedge.models.model import Model
from pykvedge.runtime.settings import LoadSettings, Settings

SHORT = Sampling(max_tokens=8)


@pytest.fixture
def llava(tiny, native):
    files = tiny("llava")
    with pykvedge.load(files.model, files.mmproj, threads=1) as loaded:
        yield loaded


def picture(seed, side=56):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def talk(session, seed=0):
    """Asks two questions, the first about a picture. Returns both answers."""
    first = session.ask("What is this?", picture(seed), SHORT).read()
    return first, session.ask("And what else is there?", sampling=SHORT).read()


def alone(tiny, plan, seed, kind="llava"):
    with tiny(kind).session(plan) as session:
        return talk(session, seed)


def test_conversations_take_turns_and_do_not_hear_each_other(tiny, llava):
    plans = [pykvedge.plan("h2o", 0.4), pykvedge.plan("full"), pykvedge.plan("lookm", 0.3)]
    expected = [alone(tiny, plan, i) for i, plan in enumerate(plans)]
    sessions = [pykvedge.Session(llava, plan=plan) for plan in plans]
    firsts = [s.ask("What is this?", picture(i), SHORT).read() for i, s in enumerate(sessions)]
    seconds = [s.ask("And what else is there?", sampling=SHORT).read() for s in sessions]
    assert list(zip(firsts, seconds, strict=True)) == expected
    assert llava.open_sessions == 3
    for session in sessions:
        session.close()
        session.close()
    assert llava.open_sessions == 0 and llava.in_memory


def test_pieces_of_two_answers_may_alternate(tiny, llava):
    plan = pykvedge.plan("h2o", 0.5)
    expected = [alone(tiny, plan, seed)[0] for seed in (1, 2)]
    with pykvedge.Session(llava, plan=plan) as a, pykvedge.Session(llava, plan=plan) as b:
        answers = [s.ask("What is this?", picture(i + 1), SHORT) for i, s in enumerate((a, b))]
        texts = ["", ""]
        for _ in range(SHORT.max_tokens + 2):
            for i, answer in enumerate(answers):
                texts[i] += next(answer, "")
        assert texts == expected


def test_the_weights_are_loaded_once(tiny, native, monkeypatch):
    loads = []
    real_model, real_encoder = Model.__init__, Encoder.__init__
    monkeypatch.setattr(Model, "__init__", lambda self, *x, **y: (loads.append("model"), real_model(self, *x, **y))[1])
    monkeypatch.setattr(Encoder, "__init__", lambda self, *x: (loads.append("eyes"), real_encoder(self, *x))[1])
    files = tiny("llava")
    with pykvedge.load(files.model, files.mmproj, threads=1) as loaded:
        sessions = [pykvedge.Session(loaded, plan=pykvedge.plan("h2o")) for _ in range(5)]
        assert len({s.model.handle for s in sessions}) == 1 and sessions[0].model.handle
        for session in sessions:
            talk(session)
            session.close()
    assert loads == ["model", "eyes"]


def mapped(file):
    """Returns the bytes of the file that are mapped into this process."""
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    return sum(int(end, 16) - int(start, 16) for start, _, end in (r.partition("-") for r in ranges))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_a_second_session_takes_no_second_set_of_weights(tiny, native):
    file = tiny("llama", n_vocab=1031).model  # a file that no other test has open
    assert mapped(file) == 0
    with pykvedge.load(file, threads=1) as loaded:
        once = mapped(file)
        assert once > 0.5 * file.stat().st_size
        sessions = [pykvedge.Session(loaded, plan=pykvedge.plan("h2o"), n_ctx=512) for _ in range(3)]
        for session in sessions:
            session.ask("Hello", sampling=SHORT).read()
        assert mapped(file) == once
        with pykvedge.Session(file, threads=1):
            assert mapped(file) == 2 * once  # a second loading would map the weights again
        for session in sessions:
            session.close()
    assert mapped(file) == 0


def test_a_closed_model_stays_until_its_last_session_is_closed(tiny, native):
    files = tiny("llava")
    loaded = pykvedge.load(files.model, files.mmproj, threads=1)
    plan = pykvedge.plan("h2o", 0.4)
    a, b = (pykvedge.Session(loaded, plan=plan) for _ in range(2))
    expected = talk(a)
    a.clear()
    loaded.close()
    loaded.close()
    assert loaded.in_memory and loaded.open_sessions == 2
    with pytest.raises(StateError, match="closed"):
        pykvedge.Session(loaded, plan=plan)
    b.close()
    assert loaded.in_memory
    assert talk(a) == expected
    a.close()
    assert not loaded.in_memory and loaded.open_sessions == 0


def test_a_model_without_sessions_is_freed_at_once(tiny, native):
    loaded = pykvedge.load(tiny("llama").model, threads=1)
    assert loaded.in_memory and not loaded.sees_images
    loaded.close()
    assert not loaded.in_memory


def test_a_session_that_could_not_be_made_borrows_nothing(tiny, llava, monkeypatch):
    from pykvedge.models import composer

    class Broken:
        def __init__(self, *_):
            raise pykvedge.ModelError("no template")

    monkeypatch.setattr(composer, "ChatTemplate", Broken)
    with pytest.raises(pykvedge.ModelError):
        pykvedge.Session(llava)
    assert llava.open_sessions == 0


def test_a_session_of_its_own_frees_its_model(tiny, native):
    session = tiny("llava").session()
    model, loan = session.model, session._loan
    assert model.handle and loan.encoder.handle
    session.close()
    assert not model.handle and not loan.encoder.handle


def test_what_belongs_to_loading_is_refused_later(tiny, llava):
    files = tiny("llava")
    for wrong in ({"mmproj": files.mmproj}, {"gpu_layers": 0}, {"verbose": True}):
        with pytest.raises(UsageError, match="load"):
            pykvedge.Session(llava, **wrong)
    for bad in ({"threads": -1}, {"threads": "two"}, {"gpu_layers": -5}):
        with pytest.raises(UsageError):
            pykvedge.load(files.model, **bad)
    assert llava.open_sessions == 0


@pytest.mark.parametrize("setting", fields(Settings), ids=lambda setting: setting.name)
def test_each_setting_is_of_the_loading_or_of_sessions(tiny, setting):
    """load refuses settings of sessions, even with their default values, and never drops a setting silently."""
    given = {setting.name: setting.default}
    if setting.name in LoadSettings.__annotations__:
        pykvedge.load(tiny("llama").model, **{"threads": 1} | given).close()
        return
    with pytest.raises(UsageError, match=f"^{setting.name} is a setting of a session"):
        pykvedge.load(tiny("llama").model, **given)
    with pykvedge.load(tiny("llama").model, threads=1) as model, pykvedge.Session(model, **given) as session:
        assert getattr(session.settings, setting.name) == setting.default


def test_loading_is_reported_and_can_be_cancelled(tiny, native):
    files, seen, cancel = tiny("llava"), [], threading.Event()
    pykvedge.load(files.model, files.mmproj, progress=lambda *x: seen.append(x)).close()
    assert {what for what, _ in seen} == {"loading the model", "loading the image encoder"}
    cancel.set()
    with pytest.raises(CancelledError):
        pykvedge.load(files.model, cancel=cancel)


def test_an_encoder_that_does_not_fit_frees_the_model(tiny, native, monkeypatch):
    closed = []
    real = Model.close
    monkeypatch.setattr(Model, "close", lambda self: (closed.append(self.path), real(self))[1])
    with pytest.raises(pykvedge.ModelError):
        pykvedge.load(tiny("llama").model, tiny("llama").model)
    assert closed == [tiny("llama").model]


# ------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
def test_sessions_of_one_model_in_several_threads(tiny, native, kind):
    """Each thread gets the answers that it gets alone, although they share an encoder for one image at a time."""
    plan, files, rounds = pykvedge.plan("lookm", 0.4), tiny(kind), 4
    expected = {seed: alone(tiny, plan, seed, kind) for seed in range(rounds)}
    got: dict[tuple[int, int], tuple[str, str]] = {}
    with pykvedge.load(files.model, files.mmproj, threads=1) as loaded:

        def work(me):
            with pykvedge.Session(loaded, plan=plan) as session:
                for i in range(rounds):
                    seed = (i + me) % rounds
                    session.clear()
                    got[me, seed] = talk(session, seed)

        in_threads(*(lambda me=me: work(me) for me in range(4)))
    assert got == {(me, seed): expected[seed] for me in range(4) for seed in range(rounds)}
    assert not loaded.in_memory


def test_only_one_image_is_encoded_at_a_time(llava):
    """Counts the calls inside the encoder: at most one at a time."""
    inside, most, lock = 0, 0, threading.Lock()
    real = llava._encoder.mtmd.mtmd_encode_chunk

    class Counted:
        def __getattr__(self, name):
            return getattr(mtmd, name)

        def mtmd_encode_chunk(self, *arguments):
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.01)  # time for another thread to enter, if it could
            status = real(*arguments)
            with lock:
                inside -= 1
            return status

    mtmd = llava._encoder.mtmd
    llava._encoder.mtmd = Counted()

    def work(seed):
        with pykvedge.Session(llava, plan=pykvedge.plan("h2o")) as session:
            session.ask("?", [picture(seed), picture(seed + 10)], SHORT).close()

    in_threads(*(lambda i=i: work(i) for i in range(4)))
    assert most == 1


def test_waiting_for_the_encoder_can_be_cancelled(llava):
    """One thread holds the encoder until the waiting thread has been told to stop."""
    begun, stopped, cancel = threading.Event(), threading.Event(), threading.Event()

    def hold(what, share):
        if what.startswith("encoding") and 0 < share < 1 and not stopped.is_set():
            begun.set()
            assert stopped.wait(60)

    def holder():
        with pykvedge.Session(llava, plan=pykvedge.plan("h2o"), progress=hold) as session:
            assert session.ask("?", [picture(1)], SHORT).read()

    def waiter():
        assert begun.wait(60)

        def told(what, share):
            if what.startswith("encoding"):
                cancel.set()

        try:
            with pykvedge.Session(llava, plan=pykvedge.plan("h2o"), progress=told, cancel=cancel) as session:
                with pytest.raises(CancelledError):
                    session.ask("?", [picture(2)], SHORT)
                assert session.messages == []
        finally:
            stopped.set()

    in_threads(holder, waiter)


def test_a_progress_function_cannot_use_the_encoder_it_is_told_of(llava):
    met = []

    def again(what, share):
        if what.startswith("encoding") and 0 < share < 1 and not met:
            with pykvedge.Session(llava, plan=pykvedge.plan("h2o")) as other, pytest.raises(StateError) as error:
                other.ask("?", [picture(2)], SHORT)
            met.append(str(error.value))

    with pykvedge.Session(llava, plan=pykvedge.plan("h2o"), progress=again) as session:
        assert session.ask("?", [picture(1)], SHORT).read()
    assert len(met) == 1 and "progress" in met[0]


def test_reasons_of_failures_stay_with_their_thread(tiny, native, tmp_path):
    """llama.cpp has one log for the process, but the reason of a failure goes only to its thread."""
    from pykvedge.native import llamacpp

    llamacpp.start(False, vision=False)
    seen = {}

    def one(name):
        with llamacpp.collected_errors() as lines:
            for i in range(200):
                llamacpp._log.receive(llamacpp._ERROR, f"{name} {i}\n".encode(), None)
                assert llamacpp.reason(lines, "none").startswith(name)
            seen[name] = {line.split()[0] for line in lines}

    in_threads(*(lambda name=name: one(name) for name in ("alpha", "beta", "gamma")))
    assert seen == {name: {name} for name in ("alpha", "beta", "gamma")}


def test_without_files_it_is_the_packaged_model(native, monkeypatch, tmp_path):
    with pykvedge.Session(threads=1) as session:
        assert session.ask("What is the code?", ROOT / "examples" / "scene-1.png", SHORT).read().strip() == "64UM3"
    with pykvedge.load() as loaded:
        assert loaded.path.name == "demo-model.gguf" and loaded.sees_images
    for make in (pykvedge.Session, pykvedge.load):
        with pytest.raises(UsageError, match="name both"):
            make(mmproj="mmproj.gguf")
    monkeypatch.setattr("pykvedge.runtime.loaded.PACKAGED", gone := tmp_path / "gone.gguf")
    with pytest.raises(UsageError, match="is missing"):
        pykvedge.Session(gone)
