"""Threads that compute and wait for each other: waiting threads leave the CPUs to others, and live across tokens.
Checked with the system's figures, in separate processes.
"""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pykvedge
from pykvedge.runtime.sampling import Sampling

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux which threads there are")
# loads the library while the process may use all CPUs, then computes on one CPU, where a thread that others wait for
# runs only when they stop
ON_ONE_PROCESSOR = """
import json, os, sys, time
import pykvedge
from pykvedge.runtime.sampling import Sampling

out = {}
with pykvedge.load(sys.argv[1], threads=1) as model:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    for threads in (1, 2):
        with pykvedge.Session(model, plan=pykvedge.plan("full"), threads=threads) as session:
            session.ask("Hello.", sampling=Sampling(max_tokens=2)).read()
            began = time.process_time()
            session.ask("Hello again.", sampling=Sampling(max_tokens=30)).read()
            out[threads] = time.process_time() - began
print(json.dumps(out))
"""


@LINUX
def test_a_thread_that_waits_leaves_its_processor(tiny, started):
    one, two = started(tiny("llama").model, program=("-c", ON_ONE_PROCESSOR)).json.values()
    assert two < 10 * one  # hundreds of times as long if each wait took a whole time slice


def of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@LINUX
def test_threads_are_kept_as_long_as_the_session(tiny):
    model = tiny("llama")
    with pykvedge.load(model.model, threads=1) as loaded, ThreadPoolExecutor(3) as pool:
        together = threading.Barrier(3)
        list(pool.map(lambda _: together.wait(), range(3)))  # all three exist
        before = of_this_process()
        with pykvedge.Session(loaded, plan=pykvedge.plan("full"), threads=3) as session:
            for _ in range(6):  # for any caller
                pool.submit(lambda: session.ask("More.", sampling=Sampling(max_tokens=2)).read()).result()
                assert of_this_process() == before + 2
        assert of_this_process() == before


class Changing:
    """Chooses another number of threads for each token."""

    def __init__(self):
        self.next = itertools.cycle((1, 3, 2))

    def threads(self):
        return next(self.next)

    def took(self, seconds):
        assert seconds > 0


def test_what_is_likely_does_not_depend_on_the_threads(tiny):
    """Equal to the last bit, even if attention over many keys is split among several threads."""
    sampling, found = Sampling(max_tokens=6, logprobs=2), []
    with pykvedge.load(tiny("llama").model, threads=3) as model:
        for chooser in (None, Changing()):
            with pykvedge.Session(model, plan=pykvedge.plan("full"), n_ctx=2048) as session:
                session._engine._thread_chooser = chooser
                answer = session.ask("What is this? " * 100, sampling=sampling)
                answer.read()
                found.append(answer.tokens)
                assert answer.report.tokens.prompt > 1000
    assert found[0] == found[1]


def test_a_number_of_threads_that_was_asked_for_stays(tiny):
    model = tiny("llama")
    with pykvedge.Session(model.model, plan=pykvedge.plan("full"), threads=2) as session:
        session.ask("Hello.", sampling=Sampling(max_tokens=20)).read()
        context = session.engine.context
        assert context.llama.llama_n_threads(context.handle) == 2
        assert session._engine._thread_chooser is None
