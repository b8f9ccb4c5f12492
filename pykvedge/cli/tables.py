"""Tables of results become text: Markdown whose columns line up, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any


def markdown(rows: list[list[str]]) -> str:
    """Writes the rows under each other, the first of which is the head."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in (rows[0], ["-" * width for width in widths], *rows[1:])
    )


def as_csv(rows: Iterable[Any], pair: str) -> str:
    """Writes a line for each dataclass, below the names of the fields. A field that ends in `pair` holds two numbers
    or None: it becomes the columns NAME_low and NAME_high. None is an empty cell.
    """
    out, writer = io.StringIO(), None
    for row in rows:
        flat: dict[str, Any] = {}
        for name, value in asdict(row).items():
            if name.endswith(pair):
                flat[f"{name}_low"], flat[f"{name}_high"] = value or (None, None)
            else:
                flat[name] = value
        if writer is None:
            writer = csv.DictWriter(out, flat, lineterminator="\n")
            writer.writeheader()
        writer.writerow(flat)
    return out.getvalue().rstrip("\n")
