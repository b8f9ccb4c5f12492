"""A picture shows what compression costs: right answers, and divergence from the full cache, by the bytes kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvedge_lab.drawing import canvas
from kvedge_lab.eval.runner import FULL
from kvedge_lab.eval.table import ALL, Line

MARKERS = "osD^vP*X<>hp"


@dataclass(frozen=True)
class Panel:
    """A panel shows a figure of a line, with its interval where there is one; None: it was not measured."""

    title: str
    value: Callable[[Line], float | None]
    interval: Callable[[Line, Line], tuple[float, float] | None]  # of a line, and of the full cache
    log: bool = False


def _score_interval(line: Line, full: Line) -> tuple[float, float] | None:
    if line.score_change is None or full.score is None:
        return None
    low, high = line.score_change
    return max(full.score + low, 0.0) * 100, min(full.score + high, 1.0) * 100


PANELS = (
    Panel("Right answers, %", lambda x: None if x.score is None else 100 * x.score, _score_interval),
    Panel("KL divergence from the full cache, nats", lambda x: x.kld, lambda x, full: x.kld_change, log=True),
)


def draw(path: Path, made: list[Line], against_full: bool) -> bool:
    """Draws one line a method over its budgets, all tasks together. False if nothing was measured that could be drawn.

    against_full: the intervals are of the difference to the full cache; others say nothing about a method's own figure.
    """
    lines = [line for line in made if line.task == ALL and line.kv_bytes]
    full = next((line for line in lines if line.method == FULL), None)
    methods: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda x: x.kv_bytes or 0.0):
        if line.method != FULL:
            methods.setdefault(line.method, []).append(line)
    panels = [p for p in PANELS if any(p.value(x) is not None for of in methods.values() for x in of)]
    if full is None or not panels:
        return False
    with canvas(path, 1, len(panels), figsize=(6.5 * len(panels), 4.5)) as axes:
        for axis, panel in zip(axes[0], panels, strict=True):
            _panel(axis, panel, methods, full, against_full)
        axes[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return True


def _panel(axis: Any, panel: Panel, methods: dict[str, list[Line]], full: Line, against_full: bool) -> None:
    for i, (name, found) in enumerate(methods.items()):
        points = [(x, value) for x in found if (value := panel.value(x)) is not None]
        if not points:
            continue
        kept = [(x.kv_bytes or 0.0) / 2**20 for x, _ in points]
        style = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "linewidth": 1.2, "color": f"C{i % 10}"}
        axis.plot(kept, [value for _, value in points], label=name, **style)
        for at, (x, _) in zip(kept, points, strict=True):
            between = panel.interval(x, full) if against_full else None
            if between is not None and not (panel.log and between[0] <= 0):
                axis.plot([at, at], between, color=style["color"], linewidth=0.7, alpha=0.6)
    value = panel.value(full)
    if value is not None and not panel.log:
        axis.axhline(value, color="#80868b", linestyle="--", linewidth=1, label="full cache")
    axis.axvline((full.kv_bytes or 0.0) / 2**20, color="#80868b", linestyle=":", linewidth=1)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="x", which="both", labelsize=7)
    if panel.log:
        axis.set_yscale("log")
    axis.set_xlabel("KV memory kept after the prompt, MiB (dotted: full cache)")
    axis.set_title(panel.title, fontsize=10)
    axis.grid(alpha=0.25)
