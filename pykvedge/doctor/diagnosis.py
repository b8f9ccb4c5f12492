"""A diagnosis says what this machine is, and what checks found that ran in a child process.

Where the child dies or hangs, that is the fault of the step that it was at, and another child goes on behind it.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pykvedge
from pykvedge.system import cpu, memory

# what `kvedge doctor` checks, in this order, and how a step of it is spoken of
SUBJECTS = {
    "libraries": "{}",
    "packages": "{}",
    "kernels": "kernels {} of libkvedge",
    "products": "products of {}",
    "model": "the packaged model with {}",
    "devices": "the device {}",
}
ASKED = ("devices",)  # groups that are checked only if they are named
CRASHES = 3  # of one part, after which the rest of it is not tried
PATIENCE_S = 120.0  # without a word from the child, it hangs
DRIVER_PATIENCE_S = 1800.0  # a driver translates its code at the first use

_SIGNALS = {"SIGILL": "illegal instruction", "SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGBUS": "bus error",
            "SIGFPE": "arithmetic error", "SIGKILL": "killed by the system (out of memory?)"}  # fmt: skip
_WINDOWS = {0xC000001D: "illegal instruction", 0xC0000005: "access violation", 0xC0000409: "abort",
            0xC0000094: "arithmetic error", 0xC00000FD: "stack overflow"}  # fmt: skip
# the child imports what this process imports, from the same places
_CHILD = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); "
    "from pykvedge.doctor.checks import main; main(**given)"
)


@dataclass
class Outcome:
    """This became of a step. fault: empty if it is sound. tried: false where its part had crashed too often."""

    group: str
    name: str = ""
    part: str = ""
    fault: str = ""
    at: str = ""
    crashed: bool = False
    tried: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Diagnosis:
    """A diagnosis has the outcomes of all steps of all groups, and the seconds that they took."""

    groups: list[str]
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Tells whether every step was tried and found right."""
        return all(o.tried and not o.fault for o in self.outcomes)

    def of(self, group: str) -> list[Outcome]:
        return [o for o in self.outcomes if o.group == group]

    def facts(self) -> dict[str, Any]:
        """Collects what the libraries said of themselves, as far as they came."""
        return {k: v for o in self.of("libraries") for k, v in o.facts.items()}

    def faults(self) -> list[str]:
        """Writes one line for each kind of fault: what it befell, what it is, and the remedy."""
        alike: dict[tuple[str, ...], list[Outcome]] = {}
        for o in self.outcomes:
            if o.fault:
                alike.setdefault((o.group, o.part, o.fault, o.at), []).append(o)
        return [_line(same, self.of(same[0].group)) for same in alike.values()]

    def as_json(self) -> dict[str, Any]:
        """Makes the object that `kvedge doctor --json` prints, in bytes and seconds."""
        told = ("group", "name", "tried", "fault", "at", "crashed")
        checks = [{**{name: getattr(o, name) for name in told}, "sound": o.tried and not o.fault,
                   "facts": {} if o.group == "libraries" else o.facts} for o in self.outcomes]  # fmt: skip
        return {
            "sound": self.sound,
            "faults": self.faults(),
            "machine": machine(),
            "libraries": self.facts(),
            "checks": checks,
            "seconds": round(self.seconds, 2),
        }


def diagnose(
    groups: list[str] | None = None,
    module: str = "pykvedge.doctor.checks",
    patience_s: float = PATIENCE_S,
    watch: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """Runs every check. Where the libraries cannot be loaded, nothing else is tried: it would say the same again.

    groups: names of functions in `module` that make steps. watch(what) hears of every step that begins.
    """
    found, started = Diagnosis(groups or [group for group in SUBJECTS if group not in ASKED]), time.monotonic()
    out = found.outcomes
    for rest in (found.groups[:1], found.groups[1:]):
        if out and out[0].fault:
            out += [Outcome(group, tried=False) for group in rest]
            break
        while rest:
            ended = _live(module, rest, out, patience_s, watch)
            # a child that died before a step, or between two: in that group another one would fare no better
            rest = rest[rest.index(ended.group) + (not ended.name) :] if ended else []
    found.seconds = time.monotonic() - started
    return found


def _live(
    module: str, groups: list[str], out: list[Outcome], patience_s: float, watch: Callable[[str], None]
) -> Outcome | None:
    """Adds the outcomes of a child's steps to `out`. Returns the one that the child died of, None if it did not."""
    known = [o for o in out if o.group == groups[0]]
    crashed = [o.part for o in known if o.crashed]
    left = sorted({part for part in crashed if crashed.count(part) >= CRASHES})
    given = {"path": sys.path, "module": module, "groups": groups, "done": [o.name for o in known], "left": left}
    now: Outcome | None = Outcome(groups[0])
    lines: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(given)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8",
        )  # fmt: skip
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        wait_s = max(patience_s, PATIENCE_S)  # a busy machine may take long to start a program
        try:
            while (text := lines.get(timeout=wait_s)) is not None:
                wait_s, line = patience_s, json.loads(text)
                over = line.pop("over", False)
                now = Outcome(**line) if line else None
                if now and over:
                    out.append(now)
                    now = Outcome(now.group)
                elif now:
                    watch(f"{now.group} {now.name} {now.part}".rstrip())
            code = child.wait(PATIENCE_S)
            death = f"ended by {how_it_ended(code) or f'exit code {code}'}{_last_words(errors)}"
        except (queue.Empty, subprocess.TimeoutExpired):
            death = f"hangs: nothing for {wait_s:g} s"
        finally:
            child.kill()
            child.wait()
    if now:
        now.fault, now.crashed = death, True
        out.append(now)
    return now


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last_words(errors: IO[bytes]) -> str:
    """Finds what ggml wrote before it aborted, or Python's last line."""
    errors.seek(0)
    said = errors.read().decode("utf-8", "replace").strip().splitlines()
    return f" ({said[-1].strip()})" if said else ""


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


def machine() -> dict[str, Any]:
    """Describes the processor, and the memory that this process can have."""
    return {
        "cpu": cpu.name(),
        "features": cpu.features(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "memory_bytes": memory.total_bytes(),
        "available_bytes": memory.available_bytes(),
        "cgroup_limit_bytes": memory.cgroup_limit(),
        "address_space_limit_bytes": memory.address_space_limit(),
    }


def _line(same: list[Outcome], all_of_group: list[Outcome]) -> str:
    first = same[0]
    group, part = first.group, first.part
    ending = f" in {part} memory"
    names = [o.name.removesuffix(ending) for o in same if o.name]
    where = ending if names and first.name.endswith(ending) else ""
    subject = SUBJECTS.get(group, f"{group} of {{}}")
    what = subject.format(", ".join(names) + where) if names else f"the check of {group}, between two steps"
    untried = sum(not o.tried and o.part == part for o in all_of_group)
    more = f" ({untried} more were not tried after that)" if untried and first.crashed else ""
    at = f" at {first.at}" if first.at and first.crashed else ""
    return "; ".join(filter(None, (f"{what}: {first.fault}{at}{more}", remedy(group, part))))


def remedy(group: str, part: str) -> str:
    """Says what mends a fault: mostly to build again, from a clone or from an installed package."""
    if group == "packages":  # its fault ends with the remedy
        return ""
    if group == "devices":
        return "do without it (--device none), or try another version of its driver"
    options = {"AMX": "KVEDGE_AMX=OFF", "CPU_REPACK": "GGML_CPU_REPACK=OFF", "CPU": "GGML_NATIVE=OFF"}
    option = options.get(part, "") if group == "products" else ""
    if (Path(pykvedge.__file__).resolve().parent.parent / "scripts" / "dev.py").is_file():
        build = f"build again with python3 scripts/dev.py build {f'-D{option}' if option else ''}".rstrip()
    else:
        how = f" with -C cmake.define.{option}" if option else ""
        build = f"install kvedge again from its source on this machine{how}"
    return build if option or group == "libraries" else f"the libraries do not fit this processor; {build}"
