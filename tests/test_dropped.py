"""Sessions and models without close() are freed when nobody refers to them any more."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
from waits import until

import pykvedge
from pykvedge.models import sandbox
from pykvedge.models.dialect import Dialect, request_for
from pykvedge.runtime.sampler import Sampler
from pykvedge.system import dropped, memory

SHORT = pykvedge.Sampling(max_tokens=4)


def talk(session):
    assert session.ask("Hello there", sampling=SHORT).read()


def test_many_sessions_take_no_more_memory_than_one(tiny, native):
    with pykvedge.load(tiny("llama").model, threads=1) as model:

        def some(n):
            for _ in range(n):
                talk(pykvedge.Session(model, n_ctx=4096))
            until(lambda: model.open_sessions == 0)
            memory.trim()
            return memory.own_bytes()

        some(3)
        before = some(1)
        assert some(20) - before < 20 << 20  # each takes at least 4 MiB


def test_many_models_take_no_more_memory_than_one(tiny, native):
    def one():
        model = pykvedge.load(tiny("llama").model, threads=1)
        gone = weakref.ref(model._model)
        talk(pykvedge.Session(model))
        del model
        until(lambda: gone() is None)

    def some(n):
        for _ in range(n):
            one()
        memory.trim()
        return memory.own_bytes()

    some(3)
    before = some(1)
    assert some(10) - before < 40 << 20  # each takes at least 14 MiB


def test_a_model_goes_after_its_sessions(tiny, native):
    order = []
    model = pykvedge.load(tiny("llama").model, threads=1)
    session = pykvedge.Session(model)
    answer = session.ask("Hello there", sampling=SHORT)
    for what, thing in (("context", session._engine.context), ("model", model._model)):
        close = thing.close
        thing.close = lambda close=close, what=what: (close(), order.append(what))
    del thing, close, model
    assert next(answer) is not None  # the answer refers to its session, and the session to the model
    gone = weakref.ref(session)
    del session, answer
    gc.collect()
    assert gone() is None and until(lambda: len(order) == 2) and order == ["context", "model"]


def test_they_are_freed_by_a_thread_of_its_own():
    class Thing:
        """An object with memory."""

    freed = []
    thing = Thing()
    dropped.add(thing, lambda: freed.append(threading.current_thread().name))
    other = Thing()
    reference = dropped.add(other, lambda: freed.append("twice"))
    dropped.remove(reference)  # closed explicitly
    del thing, other
    assert until(lambda: freed) and freed == ["kvedge-free"]


def test_no_python_runs_where_something_is_dropped(tiny, native):
    """In a finalizer, a KeyboardInterrupt would be lost, so no Python code may run there."""
    model, template = pykvedge.load(tiny("llama").model, threads=1), ("{{ messages[0].content }}", "", "")
    request = request_for([], "auto", False, {}, "none", False)
    things = {
        "model": pykvedge.load(tiny("llama").model, threads=1),
        "session": pykvedge.Session(model),
        "sampler": Sampler(pykvedge.Sampling(), model._model),
        "template": sandbox.here(*template),
        "child": sandbox.Sandbox(*template),
        "dialect": Dialect(sandbox.here(*template).describe(request), model._model),
    }
    things["child"].write({"messages": [{"role": "user", "content": "hello"}]})
    ran = []

    def seen(frame, event, what):
        if event in ("call", "c_call") and frame.f_code is not here:
            ran.append(frame.f_code.co_name)

    here = sys._getframe().f_code
    for name in list(things):
        thing = things.pop(name)
        gone = weakref.ref(thing)
        sys.setprofile(seen)
        del thing
        sys.setprofile(None)
        assert (name, gone(), ran) == (name, None, [])


AT_EXIT = """
import sys, pykvedge
model = pykvedge.load(sys.argv[1], threads=1)
session = pykvedge.Session(model)
answer = session.ask("Hello there")
next(answer)
if sys.argv[2] == "dropped":
    del session, answer, model
elif sys.argv[2] == "cycle":
    session.itself = session, answer
    del session, answer
"""


@pytest.mark.parametrize("how", ["held", "dropped", "cycle"])
def test_a_program_ends_with_sessions_open(tiny, native, how):
    command = [sys.executable, "-X", "dev", "-W", "ignore::ResourceWarning", "-c", AT_EXIT, tiny("llama").model, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.parametrize("woken", [False, True])
def test_a_child_made_by_fork_frees_what_it_makes(woken):
    """The child frees its objects, even if the parent's thread was woken just before the fork."""
    code = f"""
import os, signal, sys, time
from pykvedge.system import dropped
class Thing: pass
one = Thing()
dropped.add(one, lambda: None)
if {woken}:
    time.sleep(0.2)
    sys.setswitchinterval(60)
    one, end = None, time.time() + 0.2
    while time.time() < end:
        pass
child = os.fork()
sys.setswitchinterval(0.005)
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
freed, other = [], Thing()
dropped.add(other, lambda: freed.append(1))
del other
while not freed:
    time.sleep(0.01)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
