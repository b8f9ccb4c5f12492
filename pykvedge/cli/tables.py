"""Tables become text: Markdown whose columns line up."""

from __future__ import annotations

import textwrap

WIDTH = 80  # columns of a terminal


def markdown(rows: list[list[str]]) -> str:
    """Writes the rows under each other, the first of which is the head."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in (rows[0], ["-" * width for width in widths], *rows[1:])
    )


def folded(rows: list[list[str]], keys: int = 1) -> str:
    """Writes the columns that a terminal has no room for as further tables, which repeat the first `keys` columns.

    Columns without any value are left out.
    """
    used = [i for i in range(len(rows[0])) if i < keys or any(row[i] for row in rows[1:])]
    rows = [[row[i] for i in used] for row in rows]
    widths = [max(3, *(len(row[i]) for row in rows)) + 3 for i in range(len(rows[0]))]
    first, tables = list(range(keys)), [list(range(keys))]
    for column in range(keys, len(widths)):
        if sum(widths[i] for i in (*tables[-1], column)) >= WIDTH and len(tables[-1]) > keys:
            tables.append([*first])
        tables[-1].append(column)
    return "\n\n".join(markdown([[row[i] for i in table] for row in rows]) for table in tables)


def wrapped(text: str) -> str:
    """Breaks a paragraph into lines of a terminal's width."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
