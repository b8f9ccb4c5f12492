"""What a conversation says beside its answers goes to stderr, and is folded between words on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap

import click

from pykvedge.errors import printable


def say(text: str, dim: bool = False) -> None:
    """Writes a text. dim: it looks unlike an answer on a terminal, unless NO_COLOR is set."""
    shown = printable(text)
    if sys.stderr is not None and sys.stderr.isatty():
        shown = "\n".join(map(_folded, shown.split("\n")))
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    click.secho(shown, err=True, dim=dim or None, color=False if plain else None)


def _folded(line: str) -> str:
    """Folds a line; one whose parts stand between bars is folded at the bars."""
    parts = re.sub(r"(?<!\|) (?!\|)", "\xa0", line) if " | " in line else line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = shutil.get_terminal_size().columns
    lines = textwrap.wrap(
        parts, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=" | " in line
    )
    return "\n".join(lines).replace("\xa0", " ")
