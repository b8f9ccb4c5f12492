"""Presses Ctrl-C at random moments of the Python API, and prints the results as one JSON object. Separate process.

interrupt_worker.py MODEL MMPROJ FOLDER COUNT SEED     1,000 take some minutes
"""

import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from threads import elsewhere

import pykvedge

PLANS = [pykvedge.plan("snapkv", 0.4), pykvedge.plan("full"), pykvedge.plan("lookm", 0.3)]
SHORT = pykvedge.Sampling(max_tokens=6)
STUCK_S, PATIENCE_S = 60, 10
ROOM = np.random.default_rng(1)
PICTURE = ROOM.integers(0, 255, (336, 336, 3), dtype=np.uint8)


@pykvedge.scorer("of-the-test")
def of_the_test(layer, settings):
    """Returns the norm of each value."""
    return np.linalg.norm(layer.v, axis=-1)


class Rounds:
    """Calls API functions in random order."""

    def __init__(self, files, folder, seed):
        self.files, self.file, self.random = files, folder / "a.kvs", random.Random(seed)
        self.model = pykvedge.load(*files, threads=1)
        self.session = self.new()
        self.expected = self.fresh()
        self.session.save(self.file)
        self.under_way = ""

    def new(self):
        kept = {"keep": self.random.choice(("", "ram", "disk"))}
        kept |= {"keep_folder": str(self.file.parent)} if kept["keep"] == "disk" else {}
        return pykvedge.Session(self.model, plan=PLANS[0], undo=True, progress=lambda what, share: None, **kept)

    def fresh(self):
        self.session.clear()
        self.session.set_plan(PLANS[0])
        return self.session.ask("What is it?", PICTURE, SHORT).read()

    def ask(self):
        self.session.ask("And what is <image> this?", self.random.choice([PICTURE, [PICTURE]]), SHORT).read()

    def tokens(self):
        for _ in self.session.ask("Say more.", sampling=SHORT):
            pass

    def first(self):
        self.session.clear()
        self.session.ask("What is it?", PICTURE, SHORT)

    def set_plan(self):
        for plan in PLANS * 40:
            self.session.set_plan(plan)

    def undo(self):
        try:
            self.session.undo()
        except pykvedge.StateError:  # nothing to undo, or the message was interrupted
            self.session.clear()

    def save(self):
        try:
            self.session.save(self.file)
        except pykvedge.StateError:
            self.first()

    def load(self):
        self.session.load(self.file)

    def fork(self):
        try:
            self.session.fork().close()
        except pykvedge.StateError:
            self.first()

    def make(self):
        with self.new() as other:
            other.ask("Hello", sampling=SHORT).read()

    def load_model(self):
        pykvedge.load(*self.files, threads=1).close()

    def compress(self):
        plan = pykvedge.plan("snapkv", 0.5, scorer="of-the-test")
        pykvedge.compress(plan, *(ROOM.random((2, 2, 64, 32), np.float32) for _ in "qkv"))

    def until_pressed(self):
        calls = [self.ask, self.tokens, self.first, self.set_plan, self.undo, self.save, self.load, self.fork,
                 self.make, self.load_model, self.compress]  # fmt: skip
        while True:
            call = self.random.choice(calls)
            self.under_way = call.__name__
            call()


class Presser:
    """A thread that sends SIGINT after a given delay."""

    def __init__(self):
        self._delays, self.pressed = [], threading.Event()
        self._told = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def press_in(self, seconds):
        self.pressed.clear()
        self._delays.append(seconds)
        self._told.release()

    def _run(self):
        while True:
            self._told.acquire()
            time.sleep(self._delays.pop())
            self.pressed.set()
            os.kill(os.getpid(), signal.SIGINT)


def main(model, mmproj, folder, count, seed):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes can inherit an ignored SIGINT
    rounds, presser, seen, wrong = Rounds((model, mmproj), Path(folder), seed), Presser(), Counter(), []
    for number in range(count):
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        try:
            presser.press_in(rounds.random.random() ** 2 * 0.3)
            try:
                rounds.until_pressed()
            except KeyboardInterrupt:
                seen[rounds.under_way] += 1
            except BaseException as error:
                wrong.append(f"{number} {rounds.under_way}: {type(error).__name__}: {error}")
            if not presser.pressed.wait(1):
                wrong.append(f"{number} {rounds.under_way}: raised before it was pressed")
            time.sleep(0.001)
        except KeyboardInterrupt:
            wrong.append(f"{number} {rounds.under_way}: raised twice")
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            wrong.append(f"{number} {rounds.under_way}: the handler is another one")
        if said := elsewhere(lambda: rounds.session.set_plan(PLANS[0])):  # fails if an interrupt left a lock behind
            wrong.append(f"{number} {rounds.under_way}: {said}")
        if number % 10 == 0 and (text := rounds.fresh()) != rounds.expected:
            wrong.append(f"{number} {rounds.under_way}: answers {text!r}")
    rounds.session.close()
    gc.collect()
    end = time.monotonic() + PATIENCE_S
    while rounds.model.open_sessions and time.monotonic() < end:
        time.sleep(0.01)  # a thread frees sessions that an interrupt dropped
    rounds.model.close()
    print(json.dumps({"raised": sum(seen.values()), "in": seen, "wrong": wrong, "open": rounds.model.open_sessions}))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
