"""Memory over time: each variant runs a prompt once more, from its pictures on, while the process is watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvedge_lab import drawing
from kvedge_lab.bench.machine import Watch
from kvedge_lab.bench.matrix import STOCK, Variant

PHASES = ("encode", "prefill", "compress", "decode")
HEIGHT = 1.7  # inches of a panel
BAND = "#f1f3f4"  # behind every second phase


@dataclass
class Trace:
    """A variant's run. seconds, n_bytes: [n], since the start of the run, above the memory of the process at the start.

    phases: (name, begin, end) in seconds, in the order of PHASES; a prompt without pictures has no encoding.
    """

    prompt: str  # as in the table: model and prompt
    variant: Variant
    seconds: list[float] = field(default_factory=list)
    n_bytes: list[int] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)


def trace(prompt: str, variant: Variant, watch: Watch, encoded: float, marks: list[float]) -> Trace:
    """Makes the trace of a run. encoded: end of the encoding; marks: see Repetition; both by time.perf_counter."""
    edges = [0.0, *(at - watch.began for at in (encoded, *marks[1:]))]
    phases = [(phase, a, b) for phase, a, b in zip(PHASES, edges, edges[1:], strict=False) if b > a]
    return Trace(prompt, variant, watch.seconds, watch.n_bytes, phases)


def draw(path: Path, traces: list[Trace]) -> bool:
    """Draws a panel per prompt, a line per variant. Returns False if no run finished. Raises KvedgeError.

    Phases have equal widths, so variants of different speeds can be compared phase by phase.
    """
    prompts = dict.fromkeys(t.prompt for t in traces if t.variant.plan is not None)
    if not prompts:
        return False
    n = len({t.variant.label for t in traces})
    size = (drawing.COLUMN, HEIGHT * len(prompts) + 0.15 * -(-n // 3) + 0.4)
    with drawing.canvas(path, len(prompts), 1, size) as axes:
        for axis, prompt in zip(axes[:, 0], prompts, strict=True):
            _panel(axis, [t for t in traces if t.prompt == prompt])
            axis.set_title(prompt)
            axis.set_ylabel("memory of its own, MiB")
        drawing.legend(axis.figure, axes[:, 0])
        said = "One run each, in phases of equal width; below them milliseconds, the shortest and the longest. "
        drawing.caption(axis.figure, said + "Stock is unpatched llama.cpp.")
    return True


def _panel(axis: Any, traces: list[Trace]) -> None:
    spent = {phase: [e - b for t in traces for p, b, e in t.phases if p == phase] for phase in PHASES}
    shown = [phase for phase in PHASES if spent[phase]]
    for one in traces:
        style = drawing.style(STOCK if one.variant.plan is None else one.variant.plan.method)
        seconds = np.array(one.seconds)
        inside = seconds <= one.phases[-1][2]
        edges = [(at, shown.index(p) + i) for p, *ends in one.phases for i, at in enumerate(ends)]
        x = np.interp(seconds[inside], *zip(*edges, strict=True))
        held = np.array(one.n_bytes)[inside] / 2**20
        axis.plot(x, held, label=one.variant.label, color=style["color"], linestyle=style.get("linestyle", "-"))
    for i in range(1, len(shown), 2):
        axis.axvspan(i, i + 1, color=BAND, zorder=0, linewidth=0)
    axis.set_xlim(0, len(shown))
    axis.set_ylim(bottom=0)
    names = [f"{phase}\n{1000 * min(spent[phase]):,.0f} - {1000 * max(spent[phase]):,.0f}" for phase in shown]
    axis.set_xticks([i + 0.5 for i in range(len(shown))], names)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y")
