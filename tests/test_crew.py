"""Threads that compute an answer: where it pays, one CPU is left to other programs."""

import itertools
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from server import SCENES, asks, serving

import pykvedge
from pykvedge.runtime.thread_chooser import OtherPrograms, ThreadChooser


def chooser_of(threads, processors, used=None):
    """Returns a ThreadChooser. used: CPUs that other programs use; None: unknown."""
    return ThreadChooser(threads, processors, lambda: used)


def turns(chooser, n, conversations, seconds):
    """Takes n turns; seconds(threads) is their time. Returns the threads of each turn."""
    out = []
    for _ in range(n):
        out.append(chooser.threads(conversations))
        chooser.took(seconds(out[-1]))
    return out


def quiet(threads):
    return 0.002 / threads


def busy(threads):
    """Returns the seconds of a turn while another program uses a CPU."""
    return 0.1 if threads == 4 else 0.003


def test_somebody_alone_has_all_threads_on_a_quiet_machine():
    chooser = chooser_of(4, 4)
    found = turns(chooser, 3000, 1, quiet)
    assert found.count(4) > 0.95 * len(found) and found[-30:].count(4) >= 20


def test_a_processor_is_left_to_another_program_and_taken_back():
    chooser = chooser_of(4, 4)
    turns(chooser, 100, 1, quiet)
    found = turns(chooser, 1000, 1, busy)
    assert found.count(3) > 0.9 * len(found)  # trials take a twentieth of the time
    assert sum(busy(n) for n in found) < 2 * 1000 * busy(3)
    assert turns(chooser, 20000, 1, quiet)[-100:].count(4) > 80


def test_a_processor_is_left_while_many_are_answered_quickly():
    chooser = chooser_of(4, 4)
    assert turns(chooser, 3000, 8, quiet)[-1000:].count(3) > 900
    assert turns(chooser, 16, 1, quiet)[-1] == 4  # without other programs, all threads are used
    assert chooser.threads(2) == 3
    slow = turns(chooser, 3000, 8, lambda threads: 0.04 / threads)
    assert slow[-100:].count(4) > 80  # there is little else to do


def test_sessions_of_a_model_learn_together(tiny, monkeypatch):
    made, turned = [], []

    class Counted(ThreadChooser):
        def __init__(self, threads, processors):
            super().__init__(threads, processors)
            made.append(self)

        def took(self, seconds):
            super().took(seconds)
            turned.append(self)

    monkeypatch.setattr("pykvedge.runtime.loaded.ThreadChooser", Counted)
    few = pykvedge.Sampling(max_tokens=3, temp=0)
    with pykvedge.load(tiny("llama").model) as loaded:
        for threads, turns in ((0, 2), (0, 4), (1, 4)):  # a session with a given number does not adapt
            with pykvedge.Session(loaded, plan=pykvedge.plan("full"), threads=threads) as session:
                session.ask("Why?", [], few).read()
            assert turned == made * turns and len(made) == 1


def test_a_lucky_try_is_made_up_for():
    chooser, lucky = chooser_of(2, 2), itertools.chain([0.001] * 40, itertools.repeat(0.01))
    found = turns(chooser, 2000, 1, lambda threads: next(lucky) if threads == 2 else 0.002)
    assert found[:20].count(2) > 10 and found.count(1) > 0.9 * len(found)


def test_tries_cost_little_where_turns_are_long():
    for conversations in (1, 8):
        found = turns(chooser_of(2, 2), 2000, conversations, lambda threads: 0.06 / threads)
        assert 0 < sum(0.06 / n for n in found) - 2000 * 0.03 < 0.02 * 2000 * 0.03


def test_a_large_model_leaves_a_processor_to_another_program():
    found = turns(chooser_of(2, 2), 1000, 1, lambda threads: 0.5 if threads == 2 else 0.06)
    assert found.count(1) > 0.97 * len(found)


def test_no_tries_on_a_free_machine_where_turns_are_long():
    assert set(turns(chooser_of(2, 2, 0.02), 1000, 1, lambda threads: 0.06 / threads)) == {2}


def test_a_busy_machine_is_known_before_the_first_turn():
    found = turns(chooser_of(2, 2, 0.7), 20, 1, lambda threads: 0.2 if threads == 2 else 0.06)
    assert found.count(2) == 1  # the one trial
    found = turns(chooser_of(2, 2, 1.0), 100, 1, lambda threads: 0.12 / threads)  # two programs: all threads are faster
    assert found[:2] == [1, 1] and found[2:].count(2) > 90


def test_a_program_that_ends_is_noticed_at_once():
    used = itertools.chain([0.9] * 50, itertools.repeat(0.0))
    chooser = ThreadChooser(2, 2, lambda: next(used))
    assert turns(chooser, 50, 1, lambda threads: 0.5 if threads == 2 else 0.06).count(1) >= 49
    assert set(turns(chooser, 50, 1, lambda threads: 0.06 / threads)) == {2}


def test_other_programs_are_measured():
    others = OtherPrograms()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        time.sleep(1)
        used = others()
        loop.kill()
    assert used > 0.2 and others() is None  # too soon after the last look


@pytest.mark.parametrize(("threads", "processors", "found"), [(1, 1, {1}), (2, 8, {2}), (8, 2, {8, 1}), (8, 8, {8, 7})])
def test_no_more_than_was_asked_for(threads, processors, found):
    chooser = chooser_of(threads, processors)
    assert set(turns(chooser, 4000, 4, quiet)) == found


def test_answers_do_not_depend_on_the_threads(environment):
    with serving(environment, "--threads", "2", "--method", "lookm", "--budget", "0.3", "--parallel", "4") as server:
        questions = [asks(text, path) for path in SCENES[:2] for text in ("Describe the image.", "What is the code?")]
        alone = [server.text(said) for said in questions]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(server.text, questions * 12)) == alone * 12
        assert [server.text(said) for said in questions] == alone
