"""A Chat sends messages to a session, prints the answers, and saves the conversation in a file."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from pykvedge.chat.session import Session
from pykvedge.cli.progress import Display
from pykvedge.errors import KvedgeError, one_line, printable
from pykvedge.models.images import Picture
from pykvedge.models.prompt import Message
from pykvedge.native import crash
from pykvedge.runtime.interrupt import as_event
from pykvedge.runtime.report import Report, Saved
from pykvedge.runtime.sampling import Sampling
from pykvedge.runtime.sessionlock import SessionLock
from pykvedge.system.memory import readable
from pykvedge.system.shown import counted

INTERRUPTED = 130


@dataclass(frozen=True)
class Style:
    """How answers are printed, and how conversations are saved."""

    as_json: bool = False  # one JSON object on stdout instead of text
    quiet: bool = False  # no line about tokens, memory and time
    whole: bool = False  # conversations are saved with whole rows


def say(text: str, dim: bool = False) -> None:
    """Writes to stderr, folded between words at a terminal. dim: darker than an answer, unless NO_COLOR is set."""
    shown = printable(text)
    if sys.stderr is not None and sys.stderr.isatty():
        shown = "\n".join(map(_folded, shown.split("\n")))
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    click.secho(shown, err=True, dim=dim or None, color=False if plain else None)


def _folded(line: str) -> str:
    """Folds a line. A line with parts between bars is folded at the bars."""
    parts = re.sub(r"(?<!\|) (?!\|)", "\xa0", line) if " | " in line else line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = shutil.get_terminal_size().columns
    lines = textwrap.wrap(
        parts, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=" | " in line
    )
    return "\n".join(lines).replace("\xa0", " ")


def complain(message: object) -> None:
    """Writes one line about an error to stderr."""
    say(f"kvedge: error: {one_line(message)}")


class Chat:
    """A session at a terminal or in a pipe."""

    def __init__(
        self, session: Session, sampling: Sampling, style: Style, display: Display, file: Path | None = None
    ) -> None:
        """session: Ctrl-C sets its `cancel` event, if it has one. file: the conversation is saved there."""
        self.file = file
        self.loaded = bool(session.messages)  # the conversation comes from a file
        self.session, self.sampling, self._style, self._display = session, sampling, style, display
        self._cancel = session.cancel or threading.Event()
        self.waiting: list[Picture | Path] = []  # pictures of the next message
        self.unanswered: Message | None = None  # the last message, if it failed or was taken back
        self._noted: list[str] = []  # printed notes of the last report

    def put(self, prompt: str, pictures: Iterable[Picture | Path]) -> Report:
        """Sends one message and streams the answer to stdout. Ctrl-C ends the answer; before it: CancelledError."""
        with as_event(self._cancel):
            with self._display:
                answer = self.session.ask(prompt, pictures, self.sampling)
            self.waiting, self.unanswered = [], None
            if answer.report.not_bounded and not self._style.quiet:
                say(f"kvedge: not bounded: {one_line(answer.report.not_bounded)}")
            self._noted = []
            self._show_notes(answer.report)
            try:
                for piece in answer:
                    if not self._style.as_json:
                        print(piece, end="", flush=True)
            finally:
                answer.close()
        return answer.report

    def _show_notes(self, report: Report) -> None:
        new = [note for note in report.notes if note not in self._noted]
        self._noted += new
        if not self._style.quiet:
            for note in new:
                say(f"kvedge: {one_line(note)}")

    def undo(self) -> Message:
        """Removes the last message and returns it. Raises StateError."""
        with as_event(self._cancel):
            self.unanswered = self.session.undo()
        return self.unanswered

    def retry(self) -> None:
        """Sends the last message again, even if it failed, was stopped or was taken back."""
        message = self.unanswered or self.undo()
        self.waiting = [*message.pictures, *self.waiting]
        self.answer(message.text)

    def clear(self) -> None:
        self.loaded = False
        self.session.clear()
        self.waiting, self.unanswered = [], None

    @property
    def next_image(self) -> int:
        """The number of the next added image, as in the prompt."""
        return 1 + len(self.waiting) + sum(len(m.pictures) for m in self.session.messages)

    def _keep(self, report: Report) -> int:
        """Saves the conversation after an answer, if there is a file. Returns 1 if that fails, else 0."""
        if self.file is None:
            return 0
        turns = sum(m.role == "assistant" for m in self.session.messages)
        report.session = Saved(str(self.file), self.loaded, turns)
        try:
            with as_event(self._cancel):  # Ctrl-C must not lose a printed answer
                report.session.file_bytes = self.save(self.file)
                crash.saved(self.file)
        except KvedgeError as error:
            report.session.error = str(error)
            complain(error)
            return 1
        return 0

    def save(self, path: Path) -> int:
        """Writes the conversation to a file in the chosen style. Returns its bytes. Raises what Session.save raises."""
        return self.session.save(path, whole=self._style.whole)

    def holding(self, path: Path) -> AbstractContextManager[object]:
        """Locks a session file against other programs. Raises SessionFileError if another program uses it."""
        own = self.file is not None and os.path.realpath(path) == os.path.realpath(self.file)
        return nullcontext() if own or not self.session.messages else SessionLock(path)

    def recover(self) -> None:
        """Loads the file again after a failed message: only the file's cache has the pictures of earlier runs."""
        session = self.session
        if self.file is not None and self.loaded and not session.in_cache and self.file.exists():
            with suppress(KvedgeError), as_event(self._cancel):
                session.load(self.file, session.plan)

    def once(self, prompt: str, pictures: Iterable[Picture | Path]) -> int:
        """Asks one question. Returns the exit code: 130 if the answer was stopped, 1 if saving failed."""
        if self.loaded and not self._style.quiet and not self._style.as_json:
            self.show_loaded()
        report = self.put(prompt, pictures)
        if self._style.as_json:
            failed = self._keep(report)
            print(json.dumps(report.as_json()), flush=True)
        else:
            print(flush=True)
            self._show_line(report)
            failed = self._keep(report)
        return INTERRUPTED if report.finish == "cancelled" else failed

    def _show_line(self, report: Report) -> None:
        self._show_notes(report)  # notes that came up during the answer
        if not self._style.quiet:
            if report.finish == "context":
                say("kvedge: the answer was cut because the context is full; raise --ctx")
            elif report.finish == "length" and self.sampling.max_tokens == Sampling.max_tokens:  # nobody chose it
                say(f"kvedge: the answer was cut after {Sampling.max_tokens} tokens; raise --max-tokens")
            say(report.line(), dim=True)

    def show_loaded(self) -> None:
        """Prints to stderr what the saved conversation holds."""
        name = self.file.name if self.file is not None else "the conversation"
        say(f"{name} holds {holding(self.session)}")

    def answer(self, text: str) -> None:
        """Sends a message with the waiting images, prints its cost, and saves the conversation.

        A message that fails can be sent again, and its images keep waiting.
        """
        self.unanswered = Message("user", text)
        report = self.put(text, self.waiting)
        print(flush=True)
        self._show_line(report)
        if report.finish == "cancelled":
            say("(stopped; /retry asks again)")
        self._keep(report)


def holding(session: Session) -> str:
    """Returns one line about a conversation and its cache."""
    turns = sum(m.role == "assistant" for m in session.messages)
    images = sum(len(m.pictures) for m in session.messages)
    parts = [counted(turns, "answer"), counted(images, "image")]
    cache = session.engine.cache
    if session.in_cache and cache is not None:
        n_tokens, pairs = cache.stats().n_tokens, session.engine.pairs_held()
        size = readable(session.engine.sequence.row_bytes())
        parts.append(f"{n_tokens} tokens, {pairs:.0f} KV pairs kept per KV head, {size}")
    return ", ".join([*parts, f"method {session.plan.method}, budget {session.plan.budget}"])
