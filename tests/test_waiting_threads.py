"""Threads that compute and wait for each other: they leave the processors to others, and are kept from token to token.

By the system's own accounts, in processes of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pykvedge
from pykvedge.runtime.sampling import Sampling

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux which threads there are")
# loads the library while the process may have all processors, and computes on one: a thread that another one waits for
# cannot run before that one stops
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
def test_a_thread_that_waits_leaves_its_processor(tiny, environment):
    command = [sys.executable, "-c", ON_ONE_PROCESSOR, str(tiny("llama").model)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=300)
    one, two = json.loads(done.stdout).values()
    assert two < 10 * one  # hundreds of times as much where each wait takes what the system gives a thread at once


def of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@LINUX
def test_threads_are_kept_as_long_as_the_session(tiny):
    model = tiny("llama")
    with pykvedge.load(model.model, threads=1) as loaded, ThreadPoolExecutor(3) as pool:
        together = threading.Barrier(3)
        list(pool.map(lambda _: together.wait(), range(3)))  # all three are there
        before = of_this_process()
        with pykvedge.Session(loaded, plan=pykvedge.plan("full"), threads=3) as session:
            for _ in range(6):  # whoever asks
                pool.submit(lambda: session.ask("More.", sampling=Sampling(max_tokens=2)).read()).result()
                assert of_this_process() == before + 2
        assert of_this_process() == before
