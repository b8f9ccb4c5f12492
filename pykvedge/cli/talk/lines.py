"""Lines at a terminal may make a message of several lines; they are kept on disk, and Tab completes them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from pykvedge.system.files import write_whole

BLOCK = '"""'  # begins and ends a message of several lines
MORE = ". "  # asks for the next of them
MOST_LINES, MOST_CHARACTERS = 1000, 4000  # of the history, and of a line that it keeps

Complete = Callable[[str], list[str]]  # what a line may become


def history_file() -> Path | None:
    """Lines are remembered in the state folder of this user. None is returned for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME") or ""
    try:
        folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return folder / "kvedge" / "chat-history"


class Lines:
    """This reads what is typed. Use it in a with statement, at whose end the history is written."""

    def __init__(self, complete: Complete, history: Path | None) -> None:
        """complete(line) lists whole lines that it may become. history: with None no line is remembered."""
        self._complete, self._history = complete, history
        self._readline = _readline() if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty() else None
        self._known = 0  # entries that were read from the file
        self._found: list[str] = []

    def __enter__(self) -> Lines:
        if self._readline is not None:
            self._prepare(self._readline)
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is None:
            return
        self._readline.set_completer(None)
        if self._history is not None:
            count = self._readline.get_current_history_length()
            new = [self._readline.get_history_item(i + 1) or "" for i in range(self._known, count)]
            try:
                remember(self._history, new)
            except OSError as error:
                print(f"kvedge: {self._history} cannot be written: {error.strerror or error}", file=sys.stderr)

    def message(self, prompt: str) -> str:
        """Reads the next message or command, without blanks around it. Raises EOFError, KeyboardInterrupt.

        A line that ends in a backslash goes on in the next one; three double quotes open a block that three more close.
        """
        line = _line(prompt).strip()
        if line.startswith(BLOCK):
            rest = line[len(BLOCK) :]
            lines = []
            while not rest.rstrip().endswith(BLOCK):
                lines.append(rest)
                rest = _line(MORE)
            return "\n".join([*lines, rest.rstrip().removesuffix(BLOCK)]).strip()
        while line.endswith("\\") and not line.startswith("/"):
            line = line[:-1] + "\n" + _line(MORE).rstrip()
        return line

    def _prepare(self, readline: ModuleType) -> None:
        if self._history is not None:
            for line in read_history(self._history):
                readline.add_history(line)
        self._known = readline.get_current_history_length()
        readline.set_completer_delims("")  # a path may hold any character
        readline.set_completer(self._candidate)
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")

    def _candidate(self, line: str, number: int) -> str | None:
        if number == 0:
            try:
                self._found = self._complete(line)
            except Exception:  # a key that was pressed must not end anything
                self._found = []
        return self._found[number] if number < len(self._found) else None


def read_history(file: Path) -> list[str]:
    """Reads the lines of a history; there are none where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()[-MOST_LINES:]
    except OSError:
        return []


def remember(file: Path, lines: list[str]) -> None:
    """Adds lines to a history that only its owner may read; the oldest make room. Raises OSError."""
    lines = [line for line in lines if line.strip() and len(line) <= MOST_CHARACTERS]
    if not lines:
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = [*read_history(file), *lines][-MOST_LINES:]
    write_whole(file, "".join(line + "\n" for line in kept), 0o600)


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline


def _line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
