"""Results go to a file of JSON lines, the first of which says what is measured. Each is whole or not there.

A record is written as soon as it is measured, so that a program that is killed loses none; after each sample the file
is brought to the disk, so that a machine that stops loses one sample at most.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvedge_lab.jsonlines import JsonLines, go_on
from pykvedge.errors import UsageError

VERSION = 2
_UNSAID = {"compress": "prompt"}  # of a header that does not say it
Key = tuple[str, str, str]  # sample id, name and budget of the cell


def key_of(record: dict[str, Any]) -> Key:
    """Returns what no two records of a file share."""
    return record["id"], record["method"], str(record["budget"])


class Records:
    """These are the results so far. Without a path they are kept in memory only."""

    def __init__(self, path: Path | None, header: dict[str, Any], resume: bool) -> None:
        """header: must be that of the file, when there is one already.

        Raises UsageError for a file that is there without `resume`, that is none of ours, or that has another header;
        SaveError if it cannot be written.
        """
        self.rows: dict[Key, dict[str, Any]] = {}
        header = {"kvedge_eval": VERSION, **header}
        good = go_on(path, resume, lambda file, lines: self._read(file, lines, header))
        self._file = JsonLines(path, good)
        if not good:
            self._file.add(header)

    def _read(self, path: Path, lines: list[bytes], header: dict[str, Any]) -> None:
        """Takes over what the file holds."""
        try:
            first, *found = [json.loads(line) for line in lines]
            version = first["kvedge_eval"]
            rows = {key_of(row): row for row in found if row["digest"] and row["plan"]}
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path} holds no results of kvedge eval; save to another file") from None
        if version != VERSION:
            raise UsageError(f"{path} has version {version} of the format, not {VERSION}; save to another file")
        for name in dict.fromkeys((*header, *first)):
            then, now = first.get(name, _UNSAID.get(name)), header.get(name, _UNSAID.get(name))
            if then != now:
                raise UsageError(f"{path} was measured with {name} {then!r}, not {now!r}; save to another file")
        self.rows = rows

    def add(self, record: dict[str, Any]) -> None:
        """Keeps a record. Raises SaveError; the file then ends with the record before."""
        self.rows[key_of(record)] = record
        self._file.add(record)

    def sync(self) -> None:
        """Brings what was written to the disk."""
        self._file.sync()

    def close(self) -> None:
        """Ends the file. Does nothing the second time."""
        self._file.close()


def fingerprint(path: Path) -> str:
    """Returns name, size and a digest of the ends of a file: it tells large models apart without reading them."""
    size, end = path.stat().st_size, 1 << 20
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(end))
        file.seek(max(size - end, 0))
        digest.update(file.read(end))
    return f"{path.name} {size} {digest.hexdigest()[:16]}"
