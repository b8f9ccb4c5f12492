"""JSON lines that are written during a long run: a reader finds each line whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from pykvedge.errors import SaveError, UsageError
from pykvedge.runtime.sessionlock import IN_USE, try_lock


class JsonLines:
    """Adds lines to a file. Each line is written before `add` returns, so a killed program loses none.

    Without a path nothing is stored. A lock keeps other programs from writing to the file.
    """

    def __init__(self, path: Path | None, good: int | None = 0) -> None:
        """good: as in `keep`; None: nothing is removed yet. Raises SaveError, also if another program has the file."""
        self._path, self._good = path or Path(os.devnull), good or 0
        try:
            stream = self._path.exists() and not self._path.is_file()  # a pipe or a device
            self._file = _opened(self._path, "wb" if stream else "r+b")
        except OSError as error:
            raise self._error(error) from None
        if not stream:
            self._lock()
        if good is not None:
            self.keep(good)

    def read(self) -> bytes:
        """Returns the whole file. Raises OSError."""
        self._file.seek(0)
        return self._file.readall()

    def keep(self, good: int) -> None:
        """Keeps the first `good` bytes of the file; the rest is an incomplete last line. Raises SaveError."""
        self._good = good
        try:
            self._cut()
        except OSError as error:
            self.close()
            raise self._error(error) from None

    def add(self, line: dict[str, Any]) -> None:
        """Writes a line. Raises SaveError; the file then ends with the previous line, and is closed."""
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError as error:
            with contextlib.suppress(OSError):  # readers ignore an incomplete line
                self._cut()
            self.close()
            raise self._error(error) from None
        self._good += len(data)

    def sync(self) -> None:
        """Flushes the written lines to the disk. Raises SaveError."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if self._path.is_file():  # pipes cannot be flushed to a disk
                raise self._error(error) from None

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()

    def _cut(self) -> None:
        if self._file.seekable() and self._path.is_file():
            self._file.truncate(self._good)
            self._file.seek(self._good)

    def _lock(self) -> None:
        try:
            try_lock(self._file.fileno())
        except OSError as error:
            if error.errno not in IN_USE:
                return  # the file system has no locks
            self.close()
            raise SaveError(
                f"{self._path} is in use by another kvedge; wait until the other kvedge ends, or save to another file"
            ) from None

    def _error(self, error: OSError) -> SaveError:
        kept = "; earlier results are in this file" if self._good else ""
        return SaveError(f"{self._path} cannot be written: {error.strerror or error}{kept}")


def _opened(path: Path, mode: str) -> FileIO:
    """Opens a file, and makes a missing one without emptying a file that another program makes at this moment."""
    return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666))


class Results:
    """Results of a run in a file of JSON lines. The first line says what is measured; a later run continues the file.

    A result is written as soon as it is measured, so a killed program loses none. Without a path, results stay in
    memory only. Subclasses hold the results.
    """

    KIND = ""  # the first name in the first line; its value is VERSION
    VERSION = 1
    WHAT = ""  # the file's content in messages
    UNSAID: Mapping[str, Any] = {}  # values of names that a first line lacks
    FREE: tuple[str, ...] = ()  # names of the first line whose values may differ

    def __init__(self, path: Path | None, header: Mapping[str, Any], resume: bool = False) -> None:
        """header: must equal the header of an existing file.

        Raises UsageError if the file exists and `resume` is false, if it is of another kind, or if its header differs;
        SaveError if the file cannot be written.
        """
        first, good = {self.KIND: self.VERSION, **header}, 0
        self._file = JsonLines(path, None)
        try:
            if path is not None and path.is_file() and path.stat().st_size:
                if not resume:
                    raise UsageError(
                        f"{path} exists; add --resume to continue with this file, or give --save another file"
                    )
                good = self._go_on(path, first)
        except UsageError:
            self._file.close()
            raise
        self._file.keep(good)
        if not good:
            self._file.add(first)

    def _go_on(self, path: Path, header: dict[str, Any]) -> int:
        """Reads the results of a file, without an incomplete last line. Returns the bytes of the complete lines."""
        try:
            lines = self._file.read().split(b"\n")[:-1]
            first, *rows = [json.loads(line) for line in lines]
            version = first[self.KIND]
            names = [name for name in dict.fromkeys((*header, *first)) if name not in self.FREE]
            changed = [name for name in names if self._said(first, name) != self._said(header, name)]
            for row in rows if not changed else []:
                self._take(row)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{path} does not contain {self.WHAT}; save to another file") from None
        if version != self.VERSION:
            raise UsageError(f"{path} has format version {version}, not {self.VERSION}; save to another file")
        for name in changed[:1]:
            then, now = self._said(first, name), self._said(header, name)
            raise UsageError(f"{path} was measured with {name} {then!r:.80}, not {now!r:.80}; save to another file")
        return sum(len(line) + 1 for line in lines)

    def _said(self, header: Mapping[str, Any], name: str) -> Any:
        return header.get(name, self.UNSAID.get(name))

    def _take(self, row: dict[str, Any]) -> None:
        """Stores a result. Raises ValueError, KeyError or TypeError for a line of another kind."""
        raise NotImplementedError

    def sync(self) -> None:
        """Flushes the written lines to the disk. Raises SaveError."""
        self._file.sync()

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()
