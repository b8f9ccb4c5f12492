"""Threads that compute are given back where another thread may compute next."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pykvedge
from pykvedge.native import team
from pykvedge.runtime.sampling import Sampling

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")


def of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_an_answer_leaves_no_threads_behind(tiny):
    model = tiny("llama")
    with pykvedge.Session(model.model, plan=pykvedge.plan("full"), threads=3) as session:
        session.ask("Hello.", sampling=Sampling(max_tokens=4)).read()
        before = of_this_process()
        answer = iter(session.ask("Hello again.", sampling=Sampling(max_tokens=4)))
        next(answer)
        if of_this_process() == before:
            pytest.skip("this build of ggml has no OpenMP")
        for _ in answer:
            pass
        assert of_this_process() == before


def test_threads_that_live_on_hold_no_team(tiny):
    model = tiny("llama")
    with (
        pykvedge.Session(model.model, plan=pykvedge.plan("full"), threads=3) as session,
        ThreadPoolExecutor(3) as pool,
    ):
        session.ask("Hello.", sampling=Sampling(max_tokens=4)).read()
        together = threading.Barrier(3)
        list(pool.map(lambda _: together.wait(), range(3)))  # all three are there
        before = of_this_process()
        for _ in range(6):
            pool.submit(lambda: session.ask("More.", sampling=Sampling(max_tokens=2)).read()).result()
        assert of_this_process() == before


def test_a_thread_without_a_team_may_give_it_back():
    team.give_back()
    team.give_back()
