"""The command line has one thin command per file; program.py puts them together."""

from pykvedge.cli.program import main

__all__ = ["main"]
