"""Progress lines: to stderr, and appended to a file that stays with the weights."""

from __future__ import annotations

import sys
from pathlib import Path


class Log:
    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def __call__(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
