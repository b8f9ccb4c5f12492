"""For memory over time each variant reads a prompt once more, from its pictures on, while the process is watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvedge_lab.bench.matrix import Variant
from kvedge_lab.bench.measure import Prompt, Repetition
from kvedge_lab.drawing import canvas
from pykvedge.system import memory

INTERVAL_S = 0.002
PHASES = ("encode", "prefill", "compress", "decode")
COLOURS = ("#fde9c8", "#dbe7fb", "#f6cfcb", "#dff0df")
STOCK_COLOUR, COLOUR = "#80868b", "#1a56c4"


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
    """Writes down own_bytes every INTERVAL_S, in a thread; use it in a with statement."""

    def __init__(self) -> None:
        memory.trim()
        self.began, self._base = time.perf_counter(), memory.own_bytes()
        self.seconds: list[float] = []
        self.n_bytes: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.is_set():
            self.seconds.append(time.perf_counter() - self.began)
            self.n_bytes.append(memory.own_bytes() - self._base)
            self._done.wait(INTERVAL_S)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


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
    """Draws a panel per variant and prompt, stock's line in each. False if no run finished. Raises KvedgeError."""
    ours = [t for t in traces if t.variant.plan is not None]
    if not ours:
        return False
    with canvas(path, len(ours), 1, figsize=(9, 2.6 * len(ours)), sharex=True, sharey=True) as axes:
        for axis, mine in zip(axes[:, 0], ours, strict=True):
            _panel(axis, mine, [t for t in traces if t.variant.plan is None and t.prompt == mine.prompt])
        axes[-1, 0].set_xlabel("seconds since the run began; shaded: what kvedge was doing")
    return True


def _panel(axis: Any, mine: Trace, stock: list[Trace]) -> None:
    for phase, begin, end in mine.phases:
        axis.axvspan(begin, end, color=COLOURS[PHASES.index(phase)], label=phase, linewidth=0)
    for other in stock:
        axis.plot(other.seconds, [n / 2**20 for n in other.n_bytes], color=STOCK_COLOUR, label="llama.cpp")
    axis.plot(mine.seconds, [n / 2**20 for n in mine.n_bytes], color=COLOUR, label=mine.variant.label)
    axis.set_title(f"{mine.prompt}: {mine.variant.label}", fontsize=9, loc="left")
    axis.set_ylabel("MiB of its own")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
