"""A diagnosis describes this machine, and the results of checks that ran in a child process.

If the child dies or hangs, the current step is at fault, and another child continues after that step.
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

# the groups of `kvedge doctor`, in order -> the name of a step in messages
SUBJECTS = {
    "libraries": "{}",
    "packages": "{}",
    "kernels": "kernels {} of libkvedge",
    "products": "products of {}",
    "model": "the packaged model with {}",
    "devices": "the device {}",
}
ASKED = ("devices",)  # groups that are checked only on request
CRASHES = 3  # after so many crashes of a part, its other steps are not tried
PATIENCE_S = 120.0  # a child without output for so long hangs
DRIVER_PATIENCE_S = 1800.0  # a driver compiles its code at the first use

_SIGNALS = {"SIGILL": "illegal instruction", "SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGBUS": "bus error",
            "SIGFPE": "arithmetic error", "SIGKILL": "killed by the system (out of memory?)"}  # fmt: skip
_WINDOWS = {0xC000001D: "illegal instruction", 0xC0000005: "access violation", 0xC0000409: "abort",
            0xC0000094: "arithmetic error", 0xC00000FD: "stack overflow"}  # fmt: skip
# the child imports from the same places as this process
_CHILD = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); "
    "from pykvedge.doctor.checks import main; main(**given)"
)


@dataclass
class Outcome:
    """The result of a step. fault: "" if the step is sound. tried: false if the step's part crashed too often."""

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
    """The outcomes of all steps of all groups, and the seconds that they took."""

    groups: list[str]
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether every step was tried and is sound."""
        return all(o.tried and not o.fault for o in self.outcomes)

    def of(self, group: str) -> list[Outcome]:
        return [o for o in self.outcomes if o.group == group]

    def facts(self) -> dict[str, Any]:
        """Returns the facts that the libraries report about themselves."""
        return {k: v for o in self.of("libraries") for k, v in o.facts.items()}

    def faults(self) -> list[str]:
        """Returns one line per kind of fault: the steps, the fault, and the remedy."""
        alike: dict[tuple[str, ...], list[Outcome]] = {}
        for o in self.outcomes:
            if o.fault:
                alike.setdefault((o.group, o.part, o.fault, o.at), []).append(o)
        return [_line(same, self.of(same[0].group)) for same in alike.values()]

    def as_json(self) -> dict[str, Any]:
        """Returns the object of `kvedge doctor --json`, in bytes and seconds."""
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
    """Runs every check. If the libraries cannot be loaded, nothing else is tried: it would fail for that reason.

    groups: names of functions in `module` that make steps. watch(what) is called when a step begins.
    """
    found, started = Diagnosis(groups or [group for group in SUBJECTS if group not in ASKED]), time.monotonic()
    out = found.outcomes
    for rest in (found.groups[:1], found.groups[1:]):
        if out and out[0].fault:
            out += [Outcome(group, tried=False) for group in rest]
            break
        while rest:
            ended = _live(module, rest, out, patience_s, watch)
            # the child died before or between steps: the rest of the group would fail too
            rest = rest[rest.index(ended.group) + (not ended.name) :] if ended else []
    found.seconds = time.monotonic() - started
    return found


def _live(
    module: str, groups: list[str], out: list[Outcome], patience_s: float, watch: Callable[[str], None]
) -> Outcome | None:
    """Adds the outcomes of a child's steps to `out`. Returns the step that ended the child, or None."""
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
        wait_s = max(patience_s, PATIENCE_S)  # a busy machine may need long to start a program
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
            death = f"hangs: no output for {wait_s:g} s"
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
    """Returns ggml's last line before an abort, or Python's last line."""
    errors.seek(0)
    said = errors.read().decode("utf-8", "replace").strip().splitlines()
    return f" ({said[-1].strip()})" if said else ""


def how_it_ended(code: int) -> str:
    """Returns the reason of an abnormal end, by the exit code; "" for a normal end."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return _SIGNALS.get(name, name)
    unsigned = code & 0xFFFFFFFF
    return _WINDOWS.get(unsigned, "") if unsigned > 0xC0000000 else ""


def machine() -> dict[str, Any]:
    """Returns facts about the processor, and the memory that this process can have."""
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
    """Returns the remedy of a fault: mostly a new build, from a clone or from an installed package."""
    if group == "packages":  # the fault names the remedy
        return ""
    if group == "devices":
        return "omit this device (--device none), or try another version of its driver"
    options = {"AMX": "KVEDGE_AMX=OFF", "CPU_REPACK": "GGML_CPU_REPACK=OFF", "CPU": "GGML_NATIVE=OFF"}
    option = options.get(part, "") if group == "products" else ""
    if (Path(pykvedge.__file__).resolve().parent.parent / "scripts" / "dev.py").is_file():
        build = f"build again with python3 scripts/dev.py build {f'-D{option}' if option else ''}".rstrip()
    else:
        how = f" with -C cmake.define.{option}" if option else ""
        build = f"install kvedge again from its source on this machine{how}"
    return build if option or group == "libraries" else f"the libraries do not fit this processor; {build}"
