"""Draws rows as bars per variant for decode speed, prefill speed and KV memory, with a column per prompt.

matplotlib draws .png, .svg or .pdf; .html is a page with the .svg and a table of the figures.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from kvedge_lab import drawing
from kvedge_lab.bench.table import STEPS, Row, Spread, by_prompt
from pykvedge.errors import KvedgeError
from pykvedge.system.shown import counted

INK = "#202124"  # of spreads and marks
BAR, HEAD = 0.15, 0.35  # inches of a bar with its gap, and of a chart's title and axis
THICK = 0.75  # thickness of a bar, as a share of BAR
ACROSS = 2  # prompts side by side: both columns of a page


@dataclass(frozen=True)
class Chart:
    """A value per row, some with a spread, and a mark beside it: what is possible, or an earlier value.

    parts: components of the value, drawn in the colours of STEP_COLOURS; the rest has the bar's colour.
    """

    title: str
    value: Callable[[Row], float]
    mark: Callable[[Row], float | None]
    digits: int = 0
    spread: Callable[[Row], Spread | None] = lambda row: None
    parts: Callable[[Row], list[float]] = lambda row: []


CHARTS = (
    Chart("Decode, tokens/s", lambda r: r.decode_tok_s, lambda r: r.limit_tok_s, 1,
          lambda r: r.decode_spread),
    Chart("Prefill, tokens/s", lambda r: r.prefill_tok_s, lambda r: None, 0, lambda r: r.prefill_spread),
    Chart("KV memory after the prompt, MiB", lambda r: r.kv_kept_bytes / 2**20,
          lambda r: r.kv_peak_bytes / 2**20, 2),
)  # fmt: skip
STEP_COLOURS = dict(zip(STEPS, ("#188038", "#f9ab00", "#a142f4", "#d93025", "#12b5cb"), strict=True))
STEP_CHART = Chart("Compression, ms:", lambda r: r.compress_ms, lambda r: None, 1,
                   parts=lambda r: [getattr(r, f"device_{step}_ms") for step in STEPS])  # fmt: skip


def check(path: Path) -> None:
    """Raises UsageError if a picture in this format cannot be written."""
    drawing.check("--plot", path, (*drawing.FORMATS, ".html"))


def write(path: Path, rows: list[Row], notes: list[str]) -> None:
    """Writes the picture in the format of the file's name. Raises KvedgeError if that fails."""
    if path.suffix != ".html":
        _draw(path, rows)
        return
    picture = io.BytesIO()
    _draw(picture, rows, "svg")
    svg = picture.getvalue().decode()
    try:
        path.write_text(page(rows, notes, svg[svg.index("<svg") :]), encoding="utf-8")
    except OSError as error:
        raise KvedgeError(f"{path} cannot be written: {error.strerror or error}") from None


def _charts(rows: list[Row]) -> list[Chart]:
    """Returns the charts to draw: the steps of a compression only if one ran on a device."""
    return [*CHARTS, *([STEP_CHART] if any(row.device_compressed for row in rows) else [])]


def _largest(group: list[Row], chart: Chart) -> float:
    """Returns the largest value or spread. Marks above 1.25 times this are not drawn, so bars stay readable."""
    return max((max(chart.value(row), *(chart.spread(row) or (0.0,))) for row in group), default=1.0) or 1.0


def page(rows: list[Row], notes: list[str], picture: str) -> str:
    """Returns a self-contained HTML document."""
    head = ("model", "prompt", "variant", "prefill tok/s", "compress ms", "decode tok/s", "times stock", "KV kept MiB")
    body = [
        (r.model, r.prompt, r.variant, f"{r.prefill_tok_s:.0f}", f"{r.compress_ms:.1f}", f"{r.decode_tok_s:.1f}",
         f"{r.decode_vs_stock or 0:.2f}", f"{r.kv_kept_bytes / 2**20:.2f}")
        for r in rows
    ]  # fmt: skip
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    style = (
        "body{font-family:sans-serif;max-width:1230px;margin:0 auto;padding:0 12px}svg{max-width:100%;height:auto}"
        "div{overflow-x:auto}td,th{padding:2px 10px;text-align:left}"
    )
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvedge bench</title><style>{style}</style>'
        f"</head><body><h1>kvedge bench</h1>{picture}<div><table>{''.join(lines)}</table></div>{said}</body></html>\n"
    )


def _draw(to: Path | BinaryIO, rows: list[Row], form: str | None = None) -> None:
    groups, charts = list(by_prompt(rows).values()), _charts(rows)
    across = min(len(groups), ACROSS)
    blocks = [groups[i : i + across] for i in range(0, len(groups), across)]
    heights = [BAR * max(map(len, block)) + HEAD for block in blocks for _ in charts]
    size = (drawing.COLUMN * across, sum(heights) + 0.4)
    with drawing.canvas(to, len(heights), across, size, form, height_ratios=heights) as axes:
        for at, block in enumerate(blocks):
            for i, chart in enumerate(charts):
                line = axes[at * len(charts) + i]
                for axis, group in zip(line, block, strict=False):
                    _chart(axis, chart, group)
                    if i == 0:
                        axis.set_title(f"{group[0].model}, {group[0].prompt}\n{axis.get_title('left')}")
                for axis in line[len(block) :]:
                    axis.remove()
        few, many = min(row.rounds for row in rows), max(row.rounds for row in rows)
        said = f"Medians of {f'{few} to ' * (few != many)}{counted(many, 'round')}, whiskers: quartiles. "
        said += "Lines: the limit of tokens/s from the memory speed; the peak of KV memory."
        said += " ?: other programs used the processors during the measurement." * any(row.disturbed for row in rows)
        drawing.caption(axes[0, 0].figure, said)


def _chart(axis: Any, chart: Chart, group: list[Row]) -> None:
    """Draws the bars of one chart on matplotlib's axes."""
    most = 1.25 * _largest(group, chart)
    colours = [drawing.style(row.method)["color"] for row in group]
    axis.barh(range(len(group)), [chart.value(row) for row in group], color=colours, height=THICK)
    for i, row in enumerate(group):
        value, spread, mark = chart.value(row), chart.spread(row), chart.mark(row)
        parts = chart.parts(row)
        for begin, part, shade in zip(accumulate(parts, initial=0.0), parts, STEP_COLOURS.values(), strict=False):
            axis.barh([i], [part], left=[begin], color=shade, height=THICK)
        reach = max(value, *(spread or (0.0,)))
        if spread:
            axis.plot(spread, [i, i], color=INK, marker="|", linewidth=0.8)
        if mark is not None and mark <= most:
            axis.plot([mark, mark], [i - 0.45, i + 0.45], color=INK, linewidth=1.2)
            reach = mark if reach <= mark <= reach + 0.15 * most else reach  # the number goes behind the mark
        axis.annotate(f"{value:.{chart.digits}f}", (reach, i), (3, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(group)), [f"{row.variant} ?" if row.disturbed else row.variant for row in group])
    axis.invert_yaxis()
    axis.set_xlim(0, most)
    steps = f" {', '.join(STEP_COLOURS)}" if chart is STEP_CHART else ""
    axis.set_title(chart.title + steps, loc="left")
