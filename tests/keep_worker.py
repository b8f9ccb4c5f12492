"""Conversations with whole rows in a file, in a separate process: `keep_worker.py`, with JSON on stdin.

{"job": "memory" or "kills", "model", "folder", ...} -> the results, as JSON.
"""

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

from contexts import TinyContext, random_tokens
from keeping import Talk, emptied

import pykvedge

PLAN = pykvedge.plan("snapkv", 0.1)


def private() -> int:
    """Returns the bytes of memory that only this process uses."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def memory(job) -> dict:
    """Returns the memory during an answer: without whole rows, with whole rows in memory, and in a file."""
    found = {}
    for place in ("", "", "ram", "disk"):  # the first round is a warm-up
        context = TinyContext(job["model"], PLAN)
        context.cache.keep(place, job["folder"])
        talk = Talk(context)
        talk.say(random_tokens(job["tokens"]))
        for _ in range(20):
            talk.answer([9])
            time.sleep(0.02)  # time to write the file
        stats = context.cache.stats()
        found[place] = {"private": private(), "whole": stats.whole_bytes, "file": stats.whole_file_bytes}
        context.close()
    return found


def talk_on(context: TinyContext, folder: str, conversations: int) -> None:
    context.cache.keep("disk", folder)
    for _ in range(conversations):
        talk = Talk(emptied(context))
        for turn in range(3):
            talk.say(random_tokens(40, seed=turn))
            talk.answer([7, 8, 9])


def forked(context: TinyContext, folder: str, conversations: int) -> int:
    child = os.fork()
    if child == 0:
        talk_on(context, folder, conversations)
        os._exit(0)
    return child


def kills(job) -> dict:
    """Kills children in the middle of a conversation. Counts files during a run, and files after the next start."""
    rng, folder = random.Random(job["seed"]), Path(job["folder"])
    context = TinyContext(job["model"], PLAN)
    began = time.monotonic()
    os.waitpid(forked(context, str(folder), 1), 0)
    longest = 2 * (time.monotonic() - began)
    left = seen = mapped = 0
    for _ in range(job["kills"]):
        child = forked(context, str(folder), 1000)
        end = time.monotonic() + rng.random() * longest
        while time.monotonic() < end:
            seen += len(list(folder.iterdir()))
            time.sleep(0.001)
        mapped += str(folder) in Path(f"/proc/{child}/maps").read_text()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        context.cache.keep("disk", str(folder))  # the next start removes files of dead processes
        left += len(list(folder.iterdir()))
    context.close()
    return {"left": left, "seen": seen, "mapped": mapped}


def main() -> None:
    job = json.loads(sys.stdin.read())
    print(json.dumps({"memory": memory, "kills": kills}[job["job"]](job)))


if __name__ == "__main__":
    main()
