"""Values as people read them: numbers with their nouns, and HTML of objects for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def counted(n: int, noun: str) -> str:
    """Returns a number with its noun, for example 1 token or 2 tokens."""
    return f"{n} {noun}{'s' * (n != 1)}"


def table(title: str, rows: Mapping[str, object]) -> str:
    """Returns an HTML table with a row for each name and value."""
    body = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{body}</table>"
