"""Wrong use from several threads gives an error or waits. Each case runs in a process that must survive."""

import os
import threading

import pytest
from threads import elsewhere

from pykvedge.errors import StateError
from pykvedge.system.guard import Guard, Stop, one_thread

ROUNDS = int(os.environ.get("KVEDGE_THREAD_ROUNDS", "6"))  # of each case; races need many rounds


@pytest.fixture
def rounds(worker, tiny):
    """rounds(case) -> the result of each round."""

    def run(case):
        out = worker("thread_worker.py", None, case, ROUNDS, tiny("llama").model)
        assert len(out) == ROUNDS and "stuck" not in out
        return out

    return run


def test_two_threads_ask(rounds):
    for *two, after in rounds("two_ask"):
        assert after == "goes on"
        assert set(two) <= {"answered", "StateError"} and "answered" in two


def test_everything_else_while_a_thread_streams(rounds):
    """A call between two pieces takes over, and the reader then gets an error."""
    for reader, seen in rounds("others_while_streaming"):
        assert set(seen) <= {"StateError", "took over", "seen"}
        assert reader == ("StateError" if "took over" in seen else "answered")


def test_closing_waits_for_who_streams(rounds):
    for reader, closer, after in rounds("close_while_streaming"):
        assert reader == after == "StateError" and closer == "closed"


def test_closing_ends_a_prompt_under_way(rounds):
    for asker, closer in rounds("close_while_asking"):
        assert asker in ("CancelledError", "StateError") and closer == "closed"


def test_two_threads_complete(rounds):
    for *two, after in rounds("two_complete"):
        assert after == "answered"
        assert set(two) <= {"answered", "StateError"}


@pytest.mark.parametrize("case", ["detach_while_completing", "close_while_completing"])
def test_who_leaves_a_model_waits_for_the_token_under_way(rounds, case):
    for reader, leaver, after in rounds(case):
        assert (reader, leaver, after) == ("StateError", "left", "StateError")


def test_a_cache_looked_at_during_a_decode(rounds):
    out = rounds("stats_while_decoding")
    assert all(decoded == "decoded" and set(seen) <= {"seen", "StateError"} for decoded, seen in out)
    assert any("StateError" in seen for _, seen in out)


# ------------------------------------------------------------------------------------------------------------


class Counter:
    """A guarded object."""

    def __init__(self):
        self.guard = Guard("counter", over="the counter is closed")
        self.n = 0

    @one_thread
    def add(self):
        """One more."""
        self.n += 1
        return self.n


def test_one_thread_is_inside_and_may_come_again():
    counter = Counter()
    with counter.guard, counter.guard:
        assert counter.add() == 1
        assert "another thread is using this counter" in str(elsewhere(counter.add))
    assert elsewhere(counter.add) == 2 and counter.add.__doc__ == "One more."


def test_closing_waits_and_lets_nobody_in():
    counter, cancel = Counter(), threading.Event()
    stop = Stop(cancel, counter.guard)
    assert not stop.is_set()
    inside, closed = threading.Event(), []

    def close():
        inside.wait()
        with counter.guard.closing():
            closed.append(counter.n)

    closer = threading.Thread(target=close)
    closer.start()
    with counter.guard:
        inside.set()
        while not stop.is_set():
            pass
        assert counter.add() == 1 and not closed  # the call inside may finish
        with pytest.raises(StateError, match="during one of its own calls"), counter.guard.closing():
            pass
    closer.join()
    assert closed == [1]
    with pytest.raises(StateError, match="the counter is closed"):
        counter.add()
    cancel.set()
    assert Stop(cancel).is_set()


def test_a_session_is_not_closed_from_inside_its_own_call(tiny, native):
    said = []

    def progress(what, share):
        if what == "reading the prompt" and not said:
            with pytest.raises(StateError, match="close the session after the call") as raised:
                session.close()
            said.append(str(raised.value))

    with tiny("llama").session(progress=progress) as session:
        assert session.ask("What is this?").read() is not None and len(said) == 1
