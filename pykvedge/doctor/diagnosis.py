"""A diagnosis says what the checks found, and what this machine is: as JSON, and as one screen."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pykvedge.doctor.parent import check
from pykvedge.doctor.steps import Group, Outcome
from pykvedge.system import cpu, memory
from pykvedge.system.memory import readable


@dataclass
class Diagnosis:
    """A diagnosis has the outcomes of all steps of all groups, and the seconds that they took."""

    groups: list[Group]
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Tells whether every step was tried and found right."""
        return all(o.tried and not o.fault for o in self.outcomes)

    def of(self, group: Group) -> list[Outcome]:
        return [o for o in self.outcomes if o.group is group]

    def facts(self) -> dict[str, Any]:
        """Collects what the libraries said of themselves, as far as they came."""
        return {k: v for o in self.outcomes if o.group.name == "libraries" for k, v in o.facts.items()}

    def faults(self) -> list[str]:
        """Writes one line for each kind of fault: what it befell, what it is, and the remedy."""
        alike: dict[tuple[Any, ...], list[Outcome]] = {}
        for o in self.outcomes:
            if o.fault:
                alike.setdefault((id(o.group), o.part, o.fault, o.at), []).append(o)
        return [_line(same, self.of(same[0].group)) for same in alike.values()]

    def as_json(self) -> dict[str, Any]:
        """Makes the object that `kvedge doctor --json` prints, in bytes and seconds."""
        checks = [
            {
                "group": o.group.name,
                "name": o.name,
                "sound": o.tried and not o.fault,
                "tried": o.tried,
                "fault": o.fault,
                "at": o.at,
                "crashed": o.crashed,
                "facts": {} if o.group.name == "libraries" else o.facts,
            }
            for o in self.outcomes
        ]
        return {
            "sound": self.sound,
            "faults": self.faults(),
            "machine": machine(),
            "libraries": self.facts(),
            "checks": checks,
            "seconds": round(self.seconds, 2),
        }


def diagnose(groups: Iterable[Group], watch: Callable[[str], None] = lambda what: None) -> Diagnosis:
    """Runs every check. Where the libraries cannot be loaded, nothing else is tried: it would say the same again."""
    out, started = Diagnosis(list(groups)), time.monotonic()
    for i, group in enumerate(out.groups):
        found = check(group, watch)
        out.outcomes += found
        if i == 0 and found and found[0].fault:
            out.outcomes += [Outcome(g, "", tried=False) for g in out.groups[1:]]
            break
    out.seconds = time.monotonic() - started
    return out


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
    where = ending if part and names and same[0].name.endswith(ending) else ""
    what = group.subject.format(", ".join(names) + where) if names else f"the check of {group.name}, between two steps"
    untried = sum(not o.tried and o.part == part for o in all_of_group)
    more = f" ({untried} more were not tried after that)" if untried and first.crashed else ""
    remedy = group.remedies.get(part) or group.remedies.get("", "")
    at = f" at {first.at}" if first.at and first.crashed else ""
    return f"{what}: {first.fault}{at}{more}{'; ' + remedy if remedy else ''}"


def table(found: Diagnosis) -> list[tuple[str, str]]:
    """Makes the screen: headings and what stands beside them."""
    m, facts = machine(), found.facts()
    features = "not told by the system" if m["features"] is None else " ".join(m["features"]) or "none that matter here"
    rows = [
        ("machine", f"{m['cpu']}, {m['cores']} cores, {m['system']}"),
        ("features", features),
        ("memory", _memory(m)),
    ]
    if "libraries" in facts:
        rows.append(("kvedge", f"{facts['kvedge']} in {facts['package']}"))
        libkvedge = f", libkvedge {facts['libkvedge']}" if "libkvedge" in facts else ""
        rows.append(("libraries", f"llama.cpp {facts['llama.cpp']}{libkvedge} in {facts['libraries']}"))
        rows.append(("bindings", f"llama-cpp-python {facts['bindings']} in {facts['bindings_place']}"))
    if kernels := facts.get("kernels"):
        rest = f" (also: {', '.join(kernels[1:])})" if kernels[1:] else ""
        rows.append(("kernels", f"libkvedge chose {kernels[0]}{rest}"))
    if "cpu_features" in facts:
        rows.append(("ggml's code", f"{' '.join(facts['cpu_features'])}; {_amx(m, facts)}"))
    for device in facts.get("devices", []):
        size = readable(device["total_bytes"])
        if device["kind"] != "CPU":  # of the machine's own memory ggml calls everything free
            size = f"{readable(device['free_bytes'])} of {size} free"
        rows.append(("device", f"{device['name']}, {device['kind']}: {device['description']}, {size}"))
    return rows + [(f"check: {group.name}", _summary(found.of(group))) for group in found.groups]


def _memory(m: dict[str, Any]) -> str:
    known = [("available", "available_bytes"), ("", "memory_bytes")]
    parts = [f"{readable(m[key])} {word}".strip() for word, key in known if m[key] is not None]
    text = " of ".join(parts) or "not told by the system"
    for what, key in (("control group", "cgroup_limit_bytes"), ("address space", "address_space_limit_bytes")):
        text += f", {what} limited to {readable(m[key])}" if m[key] is not None else ""
    return text


def _amx(m: dict[str, Any], facts: dict[str, Any]) -> str:
    others = [name for name in facts["weight_memory"] if name != "CPU"]
    places = f"weights also in {', '.join(others)} memory" if others else "weights in plain memory only"
    if "amx_int8" in (m["features"] or []):
        return f"{places}, {'AMX in use' if 'AMX' in others else 'AMX left out'}"
    return places


def _summary(outcomes: list[Outcome]) -> str:
    bad = [o for o in outcomes if o.fault]
    untried = [o for o in outcomes if not o.tried]
    if not bad and not untried:
        parts = [part for part in dict.fromkeys(o.part for o in outcomes) if part]
        if len(outcomes) == len(parts) or not parts:
            return "sound: " + ", ".join(o.name for o in outcomes)
        counts = [f"{sum(o.part == part for o in outcomes)} types in {part}" for part in parts]
        return "sound: " + ", ".join(counts) + " memory"
    told = [f"{len(bad)} of {len(outcomes)} unsound"] if bad else []
    return ", ".join(told + ([f"{len(untried)} not tried"] if untried else []))
