"""Draws pictures with matplotlib for a column of a paper: sizes, and the colour and marker of each method.

A canvas becomes a file. The commands check that they can draw before they measure anything.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pykvedge.errors import KvedgeError, UsageError
from pykvedge.plans.presets import PRESETS

FORMATS = (".png", ".svg", ".pdf")
COLUMN = 3.3  # inches: width of a column of a paper
POINT = 1 / 72  # inches per point
TEXT = 7  # points of the smallest text
RULES = {
    "font.size": TEXT,
    "axes.titlesize": TEXT + 1,
    "axes.titlelocation": "left",
    "figure.labelsize": TEXT,
    "figure.titlesize": TEXT + 1,
    "legend.frameon": False,
    "legend.columnspacing": 1.2,
    "legend.handlelength": 1.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text: small files, and words that can be searched and changed
    "svg.hashsalt": "kvedge",  # equal figures give equal files
    "pdf.fonttype": 42,  # TrueType, which conferences require
}

# colours that colour-blind people can tell apart (Okabe and Ito); black and grey mean the full cache
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c564b")
MARKERS = "osD^vP*X<>h"  # every method gets a different pair of colour and marker
FIRST = ("kvedge", "lookm", "mixkv", "flashcache", "snapkv", "kvzip", "prefixkv", "elastic")  # one colour each
FULL, STOCK = {"color": "#202124", "linestyle": "--"}, {"color": "#80868b", "linestyle": "-"}


def style(method: str) -> dict[str, str]:
    """Returns colour and marker, or line, of a method. Unknown methods have a style too; it never changes."""
    if method in ("full", "stock"):
        return FULL if method == "full" else STOCK
    known = [*FIRST, *(name for name in PRESETS if name not in (*FIRST, "full"))]
    i = known.index(method) if method in known else zlib.crc32(method.encode())
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def can_draw() -> bool:
    """Returns whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def check(option: str, path: Path, formats: Sequence[str] = FORMATS) -> None:
    """Raises UsageError for a path where no picture can be written, before anything is measured."""
    if path.suffix not in formats:
        raise UsageError(f"{option} must end in {', '.join(formats)}, not '{path.suffix or path.name}'")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path} cannot be written: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: it is read-only; name another file")
    if not can_draw():
        raise UsageError(f"{option} needs matplotlib: pip install 'kvedge[plot]'")


@contextmanager
def canvas(
    to: Path | BinaryIO, rows: int, columns: int, size: tuple[float, float], form: str | None = None, **layout: Any
) -> Iterator[Any]:
    """Yields axes [rows][columns], and writes them to `to` at the end. Raises KvedgeError if that fails.

    size: inches. form: file format; None: by the file's name.
    """
    import matplotlib

    with matplotlib.rc_context(RULES):
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained", figsize=size)
        yield figure.subplots(rows, columns, squeeze=False, **layout)
        save(figure, to, form)


def save(figure: Any, to: Path | BinaryIO, form: str | None = None) -> None:
    """Writes a figure without a date. Raises KvedgeError if that fails."""
    import matplotlib

    form = form or Path(str(to)).suffix[1:]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    try:
        with matplotlib.rc_context(RULES):
            figure.savefig(to, format=form, metadata=undated)
    except OSError as error:
        raise KvedgeError(f"{to} cannot be written: {error.strerror or error}") from None


def legend(figure: Any, axes: Sequence[Any], columns: int = 3) -> None:
    """Puts one legend for all axes above them."""
    found: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found = {**dict(zip(labels, handles, strict=True)), **found}
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=columns)


def caption(figure: Any, text: str) -> None:
    """Writes a text below the axes, in lines of the column's width."""
    import textwrap

    wide = figure.get_figwidth() / POINT / (0.53 * TEXT)  # characters, each about half as wide as high
    figure.supxlabel("\n".join(textwrap.wrap(text, int(wide))), color="#444444")
