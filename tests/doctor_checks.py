"""Steps that the doctor's child process runs in tests of the doctor. Some steps end that process."""

import os
import signal
import time

from pykvedge.doctor.checks import Step
from pykvedge.errors import UnsoundError


def _end(name):
    def run(at):
        at("seven rows")
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(60)

    return run


def _say(at):
    print("not a line of the protocol", flush=True)
    return {"n": 3}


def _wrong(at):
    at("seven rows")
    raise UnsoundError("wrong: off by 2")


def sound():
    yield Step("first", _say)
    yield Step("second", lambda at: None)


sound_as_well = sound


def crash_between_sound_ones():
    yield Step("first", lambda at: {"n": 1})
    yield Step("second", _end("SIGILL"))
    yield Step("third", lambda at: {"n": 3})


def wrong():
    yield Step("first", _wrong)
    yield Step("second", lambda at: 1 / 0)
    yield Step("third", lambda at: None)


def hang():
    yield Step("first", lambda at: time.sleep(600))
    yield Step("second", lambda at: None)


def crash_often():
    for i in range(6):
        yield Step(f"T{i} in AMX memory", _end("SIGILL"), part="AMX")
    yield Step("T0 in CPU memory", lambda at: None, part="CPU")


def abort():
    def run(at):
        os.write(2, b"GGML_ASSERT(1 == 2) failed\n")
        os.abort()

    yield Step("first", run)


def crash_before_any():
    os.kill(os.getpid(), signal.SIGSEGV)
    yield Step("never", lambda at: None)


def leave():
    yield Step("first", lambda at: os._exit(7))
