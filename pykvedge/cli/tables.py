"""Tables become text: Markdown whose columns line up."""

from __future__ import annotations


def markdown(rows: list[list[str]]) -> str:
    """Writes the rows under each other, the first of which is the head."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in (rows[0], ["-" * width for width in widths], *rows[1:])
    )
