"""Writes tables as Markdown with aligned columns."""

from __future__ import annotations

import textwrap

from pykvedge.errors import one_line

WIDTH = 80  # columns of a terminal


def markdown(rows: list[list[str]]) -> str:
    """Returns the rows as a table. The first row is the head."""
    rows = [[_cell(text) for text in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in (rows[0], ["-" * width for width in widths], *rows[1:])
    )


def _cell(text: str) -> str:
    """Returns a text that is one cell of one line: names may contain line breaks, strokes and terminal commands."""
    return one_line(text).replace("|", "\\|")


def folded(rows: list[list[str]], keys: int = 1) -> str:
    """Splits a wide table into several tables of a terminal's width, which repeat the first `keys` columns.

    Empty columns are left out.
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
