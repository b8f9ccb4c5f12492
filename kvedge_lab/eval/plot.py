"""Draws the cost of compression by budget: right answers, and divergence from the full cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvedge_lab import drawing
from kvedge_lab.eval.runner import FULL
from kvedge_lab.eval.table import ALL, ResultRow

HEIGHT = 1.75  # inches of a panel
NEAR = 1.12  # budgets whose positions differ by less share one tick


@dataclass(frozen=True)
class Panel:
    """One figure of lines. value: None if it was not measured. interval: of a line and the full cache, or None."""

    title: str
    value: Callable[[ResultRow], float | None]
    interval: Callable[[ResultRow, ResultRow], tuple[float, float] | None]  # of a line, and of the full cache
    log: bool = False


def _score_interval(line: ResultRow, full: ResultRow) -> tuple[float, float] | None:
    if line.score_change is None or full.score is None:
        return None
    low, high = line.score_change
    return max(full.score + low, 0.0) * 100, min(full.score + high, 1.0) * 100


SCORE = Panel("Right answers, %", lambda x: None if x.score is None else 100 * x.score, _score_interval)
PANELS = (
    SCORE,
    Panel("KL divergence from the full cache, nats", lambda x: x.kld, lambda x, full: x.kld_change, log=True),
)


def draw(path: Path, made: list[ResultRow], against_full: bool, of: str) -> bool:
    """Draws one line per method over its budgets, all tasks together. Returns False if there is nothing to draw.

    against_full: the intervals are of the difference to the full cache; other intervals are not drawn, because they say
    nothing about one method's figure. of: the model and its tasks.
    """
    lines = [line for line in made if line.task == ALL and line.kv_bytes]
    methods = by_method(lines)
    full = next((line for line in lines if line.method == FULL), None)
    panels = [p for p in PANELS if any(p.value(x) is not None for of in methods.values() for x in of)]
    if full is None or not panels:
        return False
    legend_rows = (len(methods) + 3) // 3
    size = (drawing.COLUMN, HEIGHT * len(panels) + 0.15 * legend_rows + 0.5)
    with drawing.canvas(path, len(panels), 1, size, sharex=True) as axes:
        for axis, panel in zip(axes[:, 0], panels, strict=True):
            draw_panel(axis, panel, methods, full, against_full)
        axes[-1, 0].set_xlabel(memory_axis(full))
        drawing.legend(axis.figure, axes[:, 0])
        drawing.caption(axis.figure, f"{of}. {bars(full, against_full, any(line.score_change for line in lines))}")
    return True


def memory_axis(full: ResultRow) -> str:
    """Returns the label of the memory axis."""
    return f"KV memory kept of {(full.kv_bytes or 0) / 2**20:.3g} MiB, log axis; ticks: budgets"


def bars(full: ResultRow, against_full: bool, intervals: bool) -> str:
    """Returns the caption: the meaning of a point and its bar."""
    about = f" about {full.contexts} contexts" if full.contexts not in (0, full.samples) else ""
    shown = "bars: 95 % interval of the difference to the full cache" if against_full else "intervals are in the table"
    return f"n = {full.samples}{about} at each point; {shown if intervals else 'too few for intervals'}."


def by_method(lines: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """Returns lines of compressed caches by method, from the smallest to the largest cache."""
    methods: dict[str, list[ResultRow]] = {}
    for line in sorted(lines, key=lambda x: x.kv_bytes or 0.0):
        if line.method != FULL:
            methods.setdefault(line.method, []).append(line)
    return {name: methods[name] for name in dict.fromkeys(line.method for line in lines) if name in methods}


def draw_panel(axis: Any, panel: Panel, methods: dict[str, list[ResultRow]], full: ResultRow, intervals: bool) -> None:
    """Draws one figure of all methods over their kept memory, and the full cache as a horizontal line."""
    ticks: dict[str, list[float]] = {}
    for name, found in methods.items():
        style = drawing.style(name)
        points = [(x, value) for x in found if (value := panel.value(x)) is not None]
        kept = [(x.kv_bytes or 0.0) / (full.kv_bytes or 1.0) for x, _ in points]
        for share, (x, _) in zip(kept, points, strict=True):
            ticks.setdefault(f"{x.budget:g}", []).append(share)
            between = panel.interval(x, full) if intervals else None
            if between is not None and not (panel.log and between[0] <= 0):
                axis.plot([share] * 2, between, color=style["color"], linewidth=0.7, alpha=0.7)
        axis.plot(kept, [value for _, value in points], label=name, **style)
    value = panel.value(full)
    if value is not None and not panel.log:
        axis.axhline(value, label="full cache", zorder=0, **drawing.FULL)
    axis.set_xscale("log")
    if panel.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")  # powers of ten would have small exponents
    _budgets(axis, {text: sum(at) / len(at) for text, at in ticks.items()})
    axis.set_title(panel.title)
    axis.grid(axis="y")


def _budgets(axis: Any, places: dict[str, float]) -> None:
    """Puts ticks at the budgets. If two ticks would overlap, the larger budget is shown."""
    shown: dict[str, float] = {}
    for text, at in sorted(places.items(), key=lambda x: -x[1]):
        if not shown or min(shown.values()) > NEAR * at:
            shown[text] = at
    axis.set_xticks(list(shown.values()), list(shown))
    axis.set_xticks([], minor=True)
