"""For memory over time each variant reads a prompt once more, from its pictures on, while the process is watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvedge_lab import drawing
from kvedge_lab.bench.matrix import STOCK, Variant
from kvedge_lab.bench.measure import Prompt, Repetition
from pykvedge.system import memory

INTERVAL_S = 0.002
PHASES = ("encode", "prefill", "compress", "decode")
HEIGHT = 1.7  # inches of a panel
BAND = "#f1f3f4"  # behind every second phase


@dataclass
class Trace:
    """This is a variant's run. seconds, n_bytes: [n], since the run began, and above what the process held then.

    phases: (name, begin, end) in seconds, in the order of PHASES; a prompt without pictures has no encoding.
    """

    prompt: str  # as in the table: model and prompt
    variant: Variant
    seconds: list[float] = field(default_factory=list)
    n_bytes: list[int] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)


class Watch:
    """Writes down own_bytes every INTERVAL_S, in a thread, and once more at the end; use it in a with statement."""

    def __init__(self) -> None:
        memory.trim()
        self.began, self._base = time.perf_counter(), memory.own_bytes()
        self.seconds: list[float] = []
        self.n_bytes: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        self._look()
        while not self._done.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.n_bytes.append(memory.own_bytes() - self._base)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()


def trace(
    name: str,
    variant: Variant,
    make: Callable[[], Prompt],
    run: Callable[[Prompt, Variant], Repetition],
    drop: Callable[[Prompt], None],
) -> Trace:
    """Watches one run: make encodes the prompt, run reads it, drop frees its pictures. Raises what they raise."""
    with Watch() as watch:
        prompt = make()
        encoded = time.perf_counter() - watch.began
        try:
            marks = [at - watch.began for at in run(prompt, variant).marks]
        finally:
            drop(prompt)
    edges = [0.0, encoded if prompt.n_image_tokens else 0.0, *marks[1:]]
    phases = [(phase, a, b) for phase, a, b in zip(PHASES, edges, edges[1:], strict=False) if b > a]
    return Trace(name, variant, watch.seconds, watch.n_bytes, phases)


def draw(path: Path, traces: list[Trace]) -> bool:
    """Draws a panel per prompt, a line per variant. False if no run finished. Raises KvedgeError.

    Phases have equal widths: what a variant holds in each is seen beside the others, whatever their speeds are.
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
