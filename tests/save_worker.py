"""Kills a process during saves: `save_worker.py MODEL FILE KILLS SEED`. Prints how often each kind of file was found.

A child process saves a conversation again and again, each time with another note, as `kvedge chat --session` does,
until it is killed at a random time. The file must then be whole, and the next start must remove the files beside it.
"""

import json
import os
import random
import signal
import sys
import time
import zlib
from pathlib import Path

from conversations import a_plan, say

import pykvedge
from pykvedge.runtime.sessionlock import SessionLock

LONGEST = 0.012  # seconds until a kill, at the most: time for some saves on an idle machine


def whole(data: bytes) -> bool:
    """Returns whether the lengths and both checksums of a session file are right."""
    n_model, n_note = int.from_bytes(data[12:16], "little"), int.from_bytes(data[16:24], "little")
    n_payload, end = int.from_bytes(data[24:32], "little"), 32 + n_model + n_note
    head, payload = data[:end], data[end + 4 : end + 4 + n_payload]
    sums = zlib.crc32(head).to_bytes(4, "little"), zlib.crc32(payload).to_bytes(4, "little")
    return len(data) == end + 8 + n_payload and (data[end : end + 4], data[-4:]) == sums


def save_for_ever(session: pykvedge.Session, file: Path) -> None:
    with SessionLock(file):
        while True:
            session.messages[0].text = f"Saved by {os.getpid()} at {time.monotonic()}."
            session.save(file)


def main() -> None:
    model, file, kills, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    rng = random.Random(seed)
    found = {"kills": 0, "parts": 0, "new": 0}
    with pykvedge.Session(model, None, a_plan("merged"), threads=1) as session:
        say(session, "Hello there, what is this?")
        began = time.monotonic()
        session.save(file)
        longest = max(LONGEST, 8 * (time.monotonic() - began))
        before = file.read_bytes()
        while found["kills"] < kills:
            child = os.fork()
            if child == 0:
                save_for_ever(session, file)
            time.sleep(rng.random() * longest)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found["kills"] += 1
            found["parts"] += any(p.suffix == ".part" for p in file.parent.iterdir())
            with SessionLock(file):
                left = {p.name for p in file.parent.iterdir()} - {file.name, f"{file.name}.lock"}
            data = file.read_bytes()
            if left or not whole(data):
                sys.exit(f"kill {found['kills']}: {left or 'the file is broken'}")
            found["new"] += data != before
            before = data
        session.load(file)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
