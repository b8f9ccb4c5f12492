"""Records of kvedge eval. Their file is flushed to the disk after each sample, so a machine that stops loses at most
one sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvedge_lab.jsonlines import Results

# names of a record that are no number or None
_OTHERS = ("id", "digest", "task", "groups", "metric", "method", "plan", "reference", "answer", "klds")
Key = tuple[str, str, str]  # sample id, name and budget of the cell


def key_of(record: dict[str, Any]) -> Key:
    """Returns the key of a record, unique in its file."""
    return record["id"], record["method"], str(record["budget"])


class Records(Results):
    """The results of kvedge eval so far."""

    KIND, VERSION, WHAT = "kvedge_eval", 2, "results of kvedge eval"
    UNSAID: Mapping[str, Any] = {"compress": "prompt"}
    FREE = ("asked",)
    NEEDED: tuple[str, ...] = ("prompt_tokens", "kept")  # names of a record that are numbers

    def __init__(self, path: Path | None, header: Mapping[str, Any], resume: bool) -> None:
        """Raises what Results raises."""
        self.rows: dict[Key, dict[str, Any]] = {}
        super().__init__(path, header, resume)

    def add(self, record: dict[str, Any]) -> None:
        """Stores a record. Raises SaveError; the file then ends with the previous record."""
        self.rows[key_of(record)] = record
        self._file.add(record)

    def _take(self, row: dict[str, Any]) -> None:
        for name in (*self.NEEDED, *(name for name in row if name not in _OTHERS)):
            if not isinstance(row[name], (int, float)) and (row[name] is not None or name in self.NEEDED):
                raise ValueError(row)
        if not all(isinstance(one, (int, float)) for one in row.get("klds", ())):
            raise ValueError(row)
        if row["digest"] and row["plan"]:
            self.rows[key_of(row)] = row


def asked_before(path: Path) -> dict[str, Any]:
    """Returns the options of the run that began a file of results; {} if the file is missing or of another kind.

    Opening the file reports what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline(1 << 20))
        return dict(first["asked"]) if Records.KIND in first else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
