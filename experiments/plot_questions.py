"""Draws README's picture from the --json files of measure_questions.py: right answers by budget, one panel a protocol.

    python3 scripts/dev.py python experiments/measure_questions.py --samples 60 --method A,B --json later.json
    python3 scripts/dev.py python experiments/measure_questions.py --samples 60 --method A,B --json prompt.json \
        --compress conversation
    python3 scripts/dev.py python experiments/plot_questions.py later.json prompt.json docs/images/accuracy.svg
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import scriptpath  # noqa: F401

from kvedge_lab import drawing
from kvedge_lab.eval import plot
from kvedge_lab.eval.runner import FULL
from kvedge_lab.eval.table import ALL, ResultRow

TITLES = "Question after the compression", "Question in the compressed prompt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("later", "prompt", "picture"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    with drawing.canvas(args.picture, 1, 2, (2 * drawing.COLUMN, 2.5), sharey=True) as axes:
        for axis, path, title in zip(axes[0], (args.later, args.prompt), TITLES, strict=True):
            lines = [line for row in json.loads(path.read_text()) if (line := ResultRow(**row)).task == ALL]
            full = next(line for line in lines if line.method == FULL)
            panel = replace(plot.SCORE, title=f"{title}: {plot.SCORE.title.lower()}")
            plot.draw_panel(axis, panel, plot.by_method(lines), full, intervals=True)
            axis.set_xlabel(plot.memory_axis(full))
        drawing.legend(axis.figure, axes[0], columns=7)
        drawing.caption(axis.figure, f"Packaged model, 2.8 million parameters. {plot.bars(full, True, True)}")


if __name__ == "__main__":
    main()
