"""The command `kvedge doctor` says whether kvedge works on this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from pykvedge.cli import options
from pykvedge.cli.command import command
from pykvedge.cli.progress import Display
from pykvedge.system.memory import readable

if TYPE_CHECKING:
    from pykvedge.doctor.diagnosis import Diagnosis, Outcome


@command()
@click.option("--devices", is_flag=True, help="Also measure the processor and each GPU, about ten seconds each.")
@options.taking(options.JSON, options.QUIET)
def doctor(devices: bool, as_json: bool, quiet: bool) -> None:
    """Describe this machine, and check that kvedge computes correctly on it.

    Loads the libraries, and compares every table of kernels, and the products of every weight type in every kind of
    memory that llama.cpp may use, with plain loops. Asks the packaged model a question with a known answer. All this
    runs in child processes: a crash becomes one line that names the crashed part and the remedy.

    Names the packages with code for GPUs, such as kvedge-vulkan, and the reason for each unused package.

    With --devices the packaged model also answers on each device, and must give the processor's answer. The run
    measures how fast the device reads memory, a prompt, and an answer.

    The exit code is 0 if everything is sound, and 1 if something is not.
    """
    from pykvedge.doctor.diagnosis import DRIVER_PATIENCE_S, PATIENCE_S, SUBJECTS, diagnose

    with Display(enabled=not quiet) as display:
        found = diagnose(
            list(SUBJECTS) if devices else None,
            patience_s=DRIVER_PATIENCE_S if devices else PATIENCE_S,
            watch=lambda what: display(f"checking {what}", 1.0),
        )
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        _show(found)
    sys.exit(0 if found.sound else 1)


def _show(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, text in _rows(found):
        grid.add_row(Text(heading), Text(text))
    with console.capture() as text:  # rich would exit with 1 if nobody reads the output
        console.print(grid)
        for fault in found.faults():
            console.print(Text("unsound: " + fault), soft_wrap=True)
        verdict = "sound" if found.sound else "not sound"
        console.print(Text(f"kvedge is {verdict} on this machine ({found.seconds:.1f} s)"))
    sys.stdout.write(text.get())


def _rows(found: Diagnosis) -> list[tuple[str, str]]:
    """Returns the headings and texts of the report."""
    from pykvedge.doctor.diagnosis import machine

    m, facts = machine(), found.facts()
    features = "unknown" if m["features"] is None else " ".join(m["features"]) or "none that kvedge uses"
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
    found_at: dict[str, str] = {}
    for device in facts.get("devices", []):
        size = readable(device["total_bytes"])
        if device["kind"] != "CPU":  # ggml reports all of the machine's memory as free
            size = f"{readable(device['free_bytes'])} of {size} free"
        twin = found_at.setdefault(device["address"] or device["name"], device["name"])
        same = f"; the same GPU as {twin}, which is used" if twin != device["name"] else ""
        rows.append(("device", f"{device['name']}, {device['kind']}: {device['description']}, {size}{same}"))
    rows += [("package", f"{o.name} {_use(o)}") for o in found.of("packages") if o.name]
    rows += [("measured", f"{o.name}: {_speeds(o.facts)}") for o in found.of("devices") if o.facts]
    # a group without outcomes was not checked
    return rows + [(f"check: {group}", _summary(found.of(group))) for group in found.groups if found.of(group)]


def _use(package: Outcome) -> str:
    problem = package.fault or package.facts.get("problem", "")
    return f"is not used: {problem}" if problem else f"is used, for {package.facts['backend']}"


def _speeds(facts: dict[str, Any]) -> str:
    prompt, answer = (facts[f"{what}_tokens_per_second"] for what in ("prompt", "answer"))
    memory = facts["bytes_per_second"] / 1e9
    return f"reads {memory:.3g} GB/s; the packaged model reads {prompt:.0f} tokens/s and answers {answer:.0f} tokens/s"


def _memory(m: dict[str, Any]) -> str:
    known = [("available", "available_bytes"), ("", "memory_bytes")]
    parts = [f"{readable(m[key])} {word}".strip() for word, key in known if m[key] is not None]
    text = " of ".join(parts) or "unknown"
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
    bad = sum(bool(o.fault) for o in outcomes)
    untried = sum(not o.tried for o in outcomes)
    if bad or untried:
        told = [f"{bad} of {len(outcomes)} unsound"] * bool(bad) + [f"{untried} not tried"] * bool(untried)
        return ", ".join(told)
    parts = [part for part in dict.fromkeys(o.part for o in outcomes) if part]
    if len(outcomes) == len(parts) or not parts:
        return "sound: " + ", ".join(o.name for o in outcomes)
    counts = [f"{sum(o.part == part for o in outcomes)} types in {part}" for part in parts]
    return "sound: " + ", ".join(counts) + " memory"
