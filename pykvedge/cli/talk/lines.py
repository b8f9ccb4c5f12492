"""Reads messages at a terminal, in one line or several, with a history on disk and completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BLOCK = '"""'  # begins and ends a message of several lines
MORE = ". "  # prompt of the second and later lines
MAX_CHARACTERS = 4000  # longer messages are not stored in the history

Complete = Callable[[str], list[str]]  # line -> completions


def history_file() -> Path | None:
    """Returns the file of past messages in the user's state folder; None for a user without a home folder."""
    state = os.environ.get("XDG_STATE_HOME") or ""
    try:
        folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return folder / "kvedge" / "chat-history"


class Lines:
    """Reads messages and commands that the user types."""

    def __init__(self, complete: Complete, history: Path | None) -> None:
        """complete(line): returns completions as whole lines. history: the file of past messages; None: no history."""
        typed = sys.stdin is not None and sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
        self._prompt = _editor(complete, history) if typed else None

    def message(self, prompt: str, begun: str = "") -> str:
        """Reads the next message or command, stripped. begun: an editable first text.

        A backslash at the end of a line continues the message. Three double quotes begin a block, and three more end
        it. Raises EOFError, KeyboardInterrupt, UnicodeError.
        """
        if self._prompt is not None:
            text = self._prompt(prompt, default=begun)
        else:
            text = _line(prompt)
            while (so_far := going_on(text)) is not None:
                text = so_far + _line(MORE)
        text.encode()  # raises UnicodeError for invalid UTF-8
        text = text.strip()
        return text.removeprefix(BLOCK).removesuffix(BLOCK).strip() if text.startswith(BLOCK) else text


def going_on(text: str) -> str | None:
    """Returns the text before the next line of an unfinished message, or None for a complete message."""
    shown = text.strip()
    if shown.startswith(BLOCK):
        return None if len(shown) >= 2 * len(BLOCK) and shown.endswith(BLOCK) else text + "\n"
    return text.rstrip()[:-1] + "\n" if shown.endswith("\\") and not shown.startswith("/") else None


def _line(prompt: str) -> str:
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _editor(complete: Complete, history: Path | None) -> Callable[..., str]:
    """Returns prompt_toolkit's editor: a paste is one message, Alt-Enter adds a line, Ctrl-C clears the message."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    class Known(Completer):
        def get_completions(self, document: Document, _: Any) -> Any:
            begun = document.text_before_cursor
            word = begun.rfind(" ") + 1
            for whole in complete(begun):
                yield Completion(whole, -len(begun), display=whole[word:])

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            if len(string) <= MAX_CHARACTERS:
                with suppress(OSError, UnicodeError):  # a full disk must not end the conversation
                    super().store_string(string)

    keys = KeyBindings()

    @keys.add("enter", filter=has_focus("DEFAULT_BUFFER"))
    def _(event: Any) -> None:
        so_far = going_on(event.current_buffer.text)
        if so_far is None:
            event.current_buffer.validate_and_handle()
        else:
            event.current_buffer.document = Document(so_far)

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    keep = history is not None and _made(history)
    return PromptSession(
        multiline=True, completer=Known(), complete_while_typing=False, complete_style=CompleteStyle.READLINE_LIKE,
        prompt_continuation=lambda width, number, wrapped: "" if wrapped else MORE, key_bindings=keys,
        history=Kept(str(history)) if keep else InMemoryHistory(), enable_suspend=True,
        output=create_output(always_prefer_tty=True),
    ).prompt  # fmt: skip


def _made(history: Path) -> bool:
    """Creates the history file for its owner only. Returns False, and prints a line on stderr, if that fails."""
    try:
        history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        history.touch(mode=0o600)
        history.chmod(0o600)
        with history.open("ab"):
            return True
    except OSError as error:
        print(f"kvedge: {history} cannot be written: {error.strerror or error}", file=sys.stderr)
        return False
