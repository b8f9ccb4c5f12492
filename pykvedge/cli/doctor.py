"""The command `kvedge doctor` tells whether kvedge is sound on this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from pykvedge.cli import options

if TYPE_CHECKING:
    from pykvedge.doctor.diagnosis import Diagnosis


@click.command()
@options.taking(options.JSON, options.QUIET)
def doctor(as_json: bool, quiet: bool) -> None:
    """Tell what this machine is, and whether kvedge is sound on it.

    Loads the libraries, runs every table of kernels and the products of every weight type, in each kind of memory that
    llama.cpp may put it in, against plain loops, and asks the packaged model a question whose answer is known. All of
    that happens in child processes: a crash is one line that names what crashed, and the remedy.

    The exit code is 0 if everything is sound, and 1 if something is not.
    """
    from pykvedge.cli.progress import Display
    from pykvedge.doctor.diagnosis import diagnose
    from pykvedge.doctor.steps import groups

    display = Display(enabled=not quiet)
    try:
        found = diagnose(groups(), lambda what: display(f"checking {what}", 1.0))
    finally:
        display.done()
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        _show(found)
    sys.exit(0 if found.sound else 1)


def _show(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pykvedge.doctor.diagnosis import table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, text in table(found):
        grid.add_row(Text(heading), Text(text))
    console.print(grid)
    for fault in found.faults():
        console.print(Text("unsound: " + fault), soft_wrap=True)
    verdict = "sound" if found.sound else "not sound"
    console.print(Text(f"kvedge is {verdict} on this machine ({found.seconds:.1f} s)"))
