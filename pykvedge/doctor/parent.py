"""Groups of steps run in child processes; a child that dies or hangs is a fault of the step that it was at."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from pykvedge.doctor.steps import Group, Outcome, interpreter

CRASHES = 3  # of one part, after which the rest of it is not tried

_SIGNALS = {"SIGILL": "illegal instruction", "SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGBUS": "bus error",
            "SIGFPE": "arithmetic error", "SIGKILL": "killed by the system (out of memory?)"}  # fmt: skip
_WINDOWS = {0xC000001D: "illegal instruction", 0xC0000005: "access violation", 0xC0000409: "abort",
            0xC0000094: "arithmetic error", 0xC00000FD: "stack overflow"}  # fmt: skip


def how_it_ended(code: int) -> str:
    """Words what an exit code says of a program that did not come to its own end; empty if it did."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return _SIGNALS.get(name, name)
    unsigned = code & 0xFFFFFFFF
    return _WINDOWS.get(unsigned, "") if unsigned > 0xC0000000 else ""


@dataclass
class _Life:
    """One child said this until it ended."""

    ended: list[Outcome] = field(default_factory=list)
    done: bool = False
    step: str = ""
    part: str = ""
    at: str = ""
    death: str = ""

    def hear(self, group: Group, line: dict[str, Any]) -> None:
        if "begin" in line:
            self.step, self.part, self.at = line["begin"], line["part"], ""
        elif "at" in line:
            self.at = line["at"]
        elif "done" in line:
            self.done = True
        elif line["end"] or line["fault"]:  # an end without a name: what makes the steps failed
            fault, facts, tried = line["fault"], line["facts"], line["tried"]
            name, at = line["end"], self.at if fault else ""
            part = self.part if name else ""
            self.ended.append(Outcome(group, name, part, fault, at, False, tried, facts))
            self.step = self.part = self.at = ""


def check(group: Group, watch: Callable[[str], None] = lambda what: None) -> list[Outcome]:
    """Runs all steps of a group, in as many children as it takes. watch(what) hears of every step that begins."""
    outcomes: list[Outcome] = []
    while True:
        crashed = [o.part for o in outcomes if o.crashed]
        parts = sorted({part for part in crashed if crashed.count(part) >= CRASHES})
        life = _live(group, [o.name for o in outcomes], parts, watch)
        known = {o.name for o in outcomes}
        outcomes += [o for o in life.ended if o.name not in known]
        if not life.death:
            return outcomes
        outcomes.append(Outcome(group, life.step, life.part, life.death, life.at, crashed=True))
        if not life.step:  # before any step, or between two: another child would fare no better
            return outcomes


def _live(group: Group, skip: list[str], parts: list[str], watch: Callable[[str], None]) -> _Life:
    life = _Life()
    lines: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            interpreter(group.target, skip, parts), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            encoding="utf-8",
        )  # fmt: skip
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        try:
            while (line := lines.get(timeout=group.patience_s)) is not None:
                life.hear(group, json.loads(line))
                watch(f"{group.name} {life.step} {life.part}".rstrip())
            code = child.wait(group.patience_s)
        except (queue.Empty, subprocess.TimeoutExpired):
            life.death = f"hangs: nothing for {group.patience_s:g} s"
            return life
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if not life.done:
            life.death = "ended by " + (how_it_ended(code) or f"exit code {code}") + _last_words(errors)
    return life


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last_words(errors: IO[bytes]) -> str:
    """Finds what ggml wrote before it aborted, or Python's last line."""
    errors.seek(0)
    said = errors.read().decode("utf-8", "replace").strip().splitlines()
    return f" ({said[-1].strip()})" if said else ""
