"""Draws the costs and gains of --keep, from the tables of docs/results: right answers by question, bytes by place.

    python3 scripts/dev.py python experiments/plot_keep.py docs/images/keep.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401
from llama_source import ROOT

from kvedge_lab import drawing

RESULTS = ROOT / "docs" / "results"
SIZE = (2 * drawing.COLUMN, 2.3)
CAPTION = (
    "Answers: packaged model, 200 scenes; without --keep a chat holds up to twice as many pairs. "
    "Bytes: 1.4 B shape, snapkv, f16."
)
FILE = {"color": "#ffffff", "edgecolor": "#80868b", "hatch": "////", "linewidth": 0.6}


def table(path: Path, head: str) -> list[list[str]]:
    """Returns the cells of a page's table whose first line begins with `head`, without its first two lines."""
    lines = path.read_text("utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    rows = []
    while at < len(lines) and lines[at].startswith("|"):
        rows.append([cell.strip() for cell in lines[at].strip("|").split("|")])
        at += 1
    return rows


def draw_answers(axis: Any) -> None:
    """Draws the columns "before" and "after" of "Three methods at 0.2"."""
    for name, first, *later in table(RESULTS / "keep.md", "| method | 1st |"):
        style = drawing.style(name.strip("`"))
        for label, column, line in (("without", 0, ":"), ("with --keep", 1, "-")):
            right = [float(first), *map(float, later[column::3])]
            axis.plot(range(1, 5), right, line, label=f"{name.strip('`')} {label}", **style)
    axis.set_xticks(range(1, 5), ["1st", "2nd", "3rd", "4th"])
    axis.set_xlabel("question about one image; the full cache answers 100 %")
    axis.set_title("Right answers at 0.2, %")
    axis.grid(axis="y")


def draw_bytes(axis: Any) -> None:
    """Draws a group of bars for each length of the prompt."""
    rows = table(RESULTS / "keep.txt", "| tokens, method | | private")
    of = {row[0]: [*map(float, row[4:])] for row in rows if row[1] == "keep disk" and "snapkv" in row[0]}
    places, names, at = list[float](), list[str](), 0.0
    for tokens, (kept, _, in_file) in of.items():
        bars = ("full cache", in_file, 0.0), ("0.2", kept, 0.0), ("0.2, --keep disk", kept, in_file)
        for name, memory, beside in bars:
            axis.barh(at, memory, color="#0072b2", height=0.7, label="in memory")
            if beside:
                axis.barh(at, beside, left=memory, height=0.7, label="in a file that the system may drop", **FILE)
            places.append(at)
            names.append(f"{tokens.rsplit(',', 1)[0]} tokens: {name}")
            at -= 1.0
        at -= 0.5
    axis.set_yticks(places, names)
    axis.set_title("Keys and values, MiB")
    axis.grid(axis="x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    with drawing.canvas(args.picture, 1, 2, SIZE) as axes:
        draw_answers(axes[0, 0])
        draw_bytes(axes[0, 1])
        drawing.legend(axes[0, 0].figure, axes[0], columns=4)
        drawing.caption(axes[0, 0].figure, CAPTION)


if __name__ == "__main__":
    main()
