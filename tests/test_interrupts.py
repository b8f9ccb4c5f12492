"""Ctrl-C in the Python API raises KeyboardInterrupt once, and leaves no lock and no half-finished state."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import DEMO
from threads import elsewhere

import pykvedge
from pykvedge.errors import StateError
from pykvedge.native.calls import CallbackErrors
from pykvedge.system import signals
from pykvedge.system.guard import Guard

WORKER = Path(__file__).with_name("interrupt_worker.py")
SHORT = pykvedge.Sampling(max_tokens=8)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


@pytest.fixture(autouse=True)
def heard():
    """Makes Ctrl-C raise KeyboardInterrupt: a background process can inherit an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_at_random_moments(tmp_path, native):
    """For 1,000 moments: interrupt_worker.py MODEL MMPROJ FOLDER 1000 1."""
    command = [sys.executable, WORKER, DEMO.model, DEMO.mmproj, tmp_path, "25", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert (said["raised"], said["wrong"], said["open"]) == (25, [], 0)


# ------------------------------------------------------------------------------------------------ waiting calls


def test_it_waits_for_the_end_of_a_call_and_is_raised_once():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with signals.held(), signals.held():
            press()
            done.append(signals.pending())
        done.append("behind it")
    assert done == [True] and not signals.pending()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with signals.held():
        pass


def test_code_of_the_users_is_interrupted_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), signals.held(), signals.lifted():
        press()
        done.append("never")
    with pytest.raises(KeyboardInterrupt), signals.held():
        press()
        with signals.lifted():
            done.append("never")
    assert not done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_raises_nothing_runs_at_once():
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append("pressed"))
    with signals.held():
        press()
        assert seen == ["pressed"] and not signals.pending()
    assert seen == ["pressed"]


def test_what_another_handler_raises_is_raised_behind_the_call():
    def handler(*_):
        raise ZeroDivisionError

    signal.signal(signal.SIGINT, handler)
    with pytest.raises(ZeroDivisionError), signals.held():
        press()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_set_meanwhile_stays():
    other = signal.default_int_handler.__class__  # a callable that is never called
    with signals.held(), signals.lifted():
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other


def test_other_threads_hear_nothing():
    with pytest.raises(KeyboardInterrupt), signals.held():
        press()
        assert signals.pending() and elsewhere(signals.pending) is False


def test_what_a_callback_raises_is_raised_behind_the_call():
    errors, seen = CallbackErrors(), []

    def fails(n):
        seen.append(n)
        raise ZeroDivisionError(n)

    callback = errors.wrap(fails, "stop")
    assert callback(1) == callback(2) == "stop" and seen == [1, 2]
    with pytest.raises(ZeroDivisionError, match="1"):
        errors.raise_first()
    errors.raise_first()


# ------------------------------------------------------------------------------------------------ guards


def test_a_guard_is_left_unlocked():
    guard = Guard("thing", over="the thing is closed")
    with pytest.raises(KeyboardInterrupt), guard:
        press()

    def use():
        with guard:
            return "free"

    assert elsewhere(use) == "free"


def test_closing_is_interrupted_while_another_thread_is_inside():
    guard, inside, leave = Guard("thing", over="the thing is closed"), threading.Event(), threading.Event()

    def stay():
        with guard:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    threading.Timer(0.2, press).start()
    with pytest.raises(KeyboardInterrupt), guard.closing():
        pytest.fail("another thread is inside")
    leave.set()
    thread.join()
    with guard.closing():  # closes again, completely
        pass


# ------------------------------------------------------------------------------------------------ sessions


def test_a_message_that_was_interrupted_is_taken_back(tiny, native):
    presses = []

    def progress(what, share):
        if presses and what == "reading the prompt":
            threading.Thread(target=presses.pop()).start()

    with tiny("llama").session(progress=progress) as session:
        first = session.ask("Hello there", sampling=SHORT).read()
        presses.append(press)
        with pytest.raises(KeyboardInterrupt):
            session.ask("word " * 1200, sampling=SHORT)
        assert len(session.messages) == 2 and not presses
        session.clear()
        assert session.ask("Hello there", sampling=SHORT).read() == first


def test_an_answer_that_was_interrupted_ends_there(tiny, native):
    with tiny("llama").session() as session:
        answer = session.ask("Hello there", sampling=pykvedge.Sampling(max_tokens=300))
        next(answer)
        threading.Timer(0.02, press).start()
        with pytest.raises(KeyboardInterrupt):
            answer.read()
        assert answer.report.finish == "cancelled" and list(answer) == []
        assert session.messages[-1].text == answer.report.text and session.in_cache
        assert session.ask("And?", sampling=SHORT).read()


def test_what_progress_raises_while_a_bounded_prompt_is_read_is_raised(tiny, native, capfd):
    def progress(what, share):
        if what == "reading the prompt, layer by layer":
            raise ZeroDivisionError

    plan = pykvedge.plan("snapkv", 0.3)
    with tiny("llama").session(plan, bounded=True, progress=progress) as session:
        with pytest.raises(ZeroDivisionError):
            session.ask("word " * 200, sampling=SHORT)
        assert not session.messages
    assert "ignored" not in capfd.readouterr().err


def test_a_generator_that_waits_is_interrupted(tiny, native):
    def frames():
        threading.Timer(0.1, press).start()
        threading.Event().wait(60)
        yield from ()

    with tiny("llava").session(pykvedge.plan("h2o", 64), stream=True) as session:
        with pytest.raises(KeyboardInterrupt):
            session.ask("What happens?", frames(), SHORT)
        assert not session.messages


def test_a_plugin_that_waits_is_interrupted(native):
    @pykvedge.scorer("waits")
    def waits(layer, settings):
        threading.Timer(0.1, press).start()
        threading.Event().wait(60)

    rows = np.zeros((1, 2, 64, 32), np.float32)
    with pytest.raises(KeyboardInterrupt):
        pykvedge.compress(pykvedge.plan("snapkv", 0.5, scorer="waits"), rows, rows, rows)


def test_an_answer_that_another_thread_reads_goes_on(tiny, native):
    """Ctrl-C concerns only the main thread: with asyncio it ends the task, not the work of another thread."""
    with tiny("llama").session() as session:
        expected = session.ask("Hello there", sampling=pykvedge.Sampling(max_tokens=100)).read()
        session.clear()
        texts, begun = [], threading.Event()

        def read():
            begun.set()
            texts.append(session.ask("Hello there", sampling=pykvedge.Sampling(max_tokens=100)).read())

        async def main():
            await asyncio.to_thread(read)

        def later():
            begun.wait()
            press()

        threading.Thread(target=later).start()
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())  # waits for its threads at the end
        assert texts == [expected]


def test_a_session_is_not_used_by_what_it_calls(tiny, native):
    said = []

    def frames():
        for use in (lambda: session.ask("And this?"), session.clear, lambda: session.save("x")):
            with pytest.raises(StateError, match="during another call"):
                use()
            said.append("refused")
        yield np.zeros((32, 32, 3), np.uint8)

    with tiny("llava").session(pykvedge.plan("h2o", 64), stream=True) as session:
        assert session.ask("What happens?", frames(), SHORT).read() and said == ["refused"] * 3
