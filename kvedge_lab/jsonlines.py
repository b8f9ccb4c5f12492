"""JSON lines are written while something long runs: each line is whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pykvedge.errors import SaveError, UsageError


def go_on(path: Path | None, resume: bool, take: Callable[[Path, list[bytes]], None]) -> int:
    """Hands the lines of a file to take(path, lines), and returns their bytes; 0 where there is no such file.

    A last line that was not written to its end is left out.
    Raises UsageError for a file that is there without `resume` or cannot be read, and what `take` raises.
    """
    if path is None or not path.is_file() or not path.stat().st_size:
        return 0
    if not resume:
        raise UsageError(f"{path} exists; add --resume to go on with it, or save to another file")
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    take(path, lines)
    return sum(len(line) + 1 for line in lines)


class JsonLines:
    """Adds lines to a file, each written before `add` returns, so that a program that is killed loses none.

    Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, good: int = 0) -> None:
        """good: bytes of the file to keep; the rest is a line that was not written to its end. Raises SaveError."""
        self._path, self._good = path or Path(os.devnull), good
        try:
            self._file = self._path.open("r+b" if self._path.is_file() else "wb", buffering=0)
            self._file.seek(good)
            self._cut()
        except OSError as error:
            raise self._error(error) from None

    def add(self, line: dict[str, Any]) -> None:
        """Writes a line. Raises SaveError; the file then ends with the line before, and is closed."""
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError as error:
            with contextlib.suppress(OSError):  # readers leave out a torn line anyway
                self._cut()
            self.close()
            raise self._error(error) from None
        self._good += len(data)

    def sync(self) -> None:
        """Brings what was written to the disk. Raises SaveError."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if self._path.is_file():  # pipes cannot be synchronised, and need not be
                raise self._error(error) from None

    def close(self) -> None:
        """Ends the file. Does nothing the second time."""
        self._file.close()

    def _cut(self) -> None:
        if self._file.seekable() and self._path.is_file():
            self._file.truncate(self._good)

    def _error(self, error: OSError) -> SaveError:
        kept = "; what was measured before is in it" if self._good else ""
        return SaveError(f"{self._path} cannot be written: {error.strerror or error}{kept}")
