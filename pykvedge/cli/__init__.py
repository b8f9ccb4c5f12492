"""The command line: one thin command per file, which program.py puts together."""

from pykvedge.cli.program import main

__all__ = ["main"]
