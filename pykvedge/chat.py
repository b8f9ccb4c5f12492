"""Chatting: one question with its answer, or a conversation at the terminal."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pykvedge.display import Display
from pykvedge.errors import KvedgeError, UsageError, unknown
from pykvedge.images import Picture, load_picture
from pykvedge.interrupt import CancelledError, as_event, as_exception
from pykvedge.memory import readable
from pykvedge.presets import plan as make_plan
from pykvedge.report import Report, Saved
from pykvedge.sampling import Sampling
from pykvedge.session import Session

INTERRUPTED = 130

HELP = """\
/image PATH             add an image to the next message (jpg, png, webp, bmp, gif)
/method NAME [BUDGET]   compress the messages from now on by another method: /method lookm 0.2
/stats                  tokens, memory and time of the last answer
/save [FILE]            write the conversation and its cache to a file; --session FILE goes on with it
/clear                  start a new conversation
/help                   this list
/exit                   leave; so do Ctrl-D, and Ctrl-C twice
Anything else is put to the model. Ctrl-C stops an answer."""


@dataclass(frozen=True)
class Style:
    """How answers are shown."""

    as_json: bool = False  # one object on stdout instead of the text
    quiet: bool = False  # no line about tokens, memory and time


def complain(message: object) -> None:
    """One line about an error, on stderr."""
    print("kvedge: error: " + " ".join(str(message).split()), file=sys.stderr, flush=True)


class Chat:
    """A session at a terminal or in a pipe."""

    def __init__(
        self, session: Session, sampling: Sampling, style: Style, display: Display, file: Path | None = None
    ) -> None:
        """session: should have been made with a `cancel` event, which Ctrl-C sets. file: saved to after each answer."""
        self._file, self._loaded = file, bool(session.messages)
        self._session, self._sampling, self._style, self._display = session, sampling, style, display
        self._cancel = session.cancel or threading.Event()
        self._waiting: list[Picture | Path] = []  # for the next message

    def put(self, prompt: str, pictures: Sequence[Picture | Path]) -> Report:
        """Puts one message, streams the answer to stdout. Ctrl-C ends it; CancelledError if it had not begun."""
        with as_event(self._cancel):
            try:
                answer = self._session.ask(prompt, pictures, self._sampling)
            finally:
                self._display.done()
            if answer.report.not_bounded and not self._style.quiet:
                print(f"kvedge: not bounded: {answer.report.not_bounded}", file=sys.stderr, flush=True)
            try:
                for piece in answer:
                    if not self._style.as_json:
                        print(piece, end="", flush=True)
            finally:
                answer.close()
        return answer.report

    def _keep(self, report: Report) -> int:
        """Saves the conversation where a file is kept, after the answer was shown. Returns 1 if that fails, else 0."""
        if self._file is None:
            return 0
        turns = sum(m.role == "assistant" for m in self._session.messages)
        report.session = Saved(str(self._file), self._loaded, turns)
        try:
            report.session.file_bytes = self._session.save(self._file)
        except KvedgeError as error:
            report.session.error = str(error)
            complain(error)
            return 1
        return 0

    def _recover(self) -> None:
        """After a message that failed half-way: pictures of a loaded conversation are in the file's cache only."""
        session = self._session
        if self._file is not None and self._loaded and not session.in_cache and self._file.exists():
            with suppress(KvedgeError):
                session.load(self._file, session.plan)

    def once(self, prompt: str, pictures: Sequence[Picture | Path]) -> int:
        """One question. Returns the exit code: 130 if the answer was stopped, 1 if it could not be saved."""
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
        if not self._style.quiet:
            print(report.line(), file=sys.stderr, flush=True)

    # ---------------------------------------------------------------------------------------------------

    def converse(self, pictures: Sequence[Picture | Path]) -> int:
        """A conversation until the user leaves. pictures: for the first message."""
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and history

        as_exception()
        self._waiting = list(pictures)
        print(f"{self._session.model.path.name}, method {self._session.plan.method}. /help lists the commands.",
              file=sys.stderr)  # fmt: skip
        interrupts = 0
        while interrupts < 2:
            try:
                line = _read_line("> ").strip()
            except EOFError:
                print(file=sys.stderr)
                return 0
            except KeyboardInterrupt:
                interrupts += 1
                print("\n(Ctrl-C again, Ctrl-D or /exit leave)" if interrupts < 2 else "", file=sys.stderr)
                continue
            interrupts = 0
            if line in ("/exit", "/quit"):
                return 0
            if line:
                self._respond(line)
        return 0

    def _respond(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                report = self.put(line, self._waiting)
                self._waiting = []
                print(flush=True)
                self._show_line(report)
                self._keep(report)
        except CancelledError:
            print("(stopped before the answer began)", file=sys.stderr)
            self._recover()
        except KvedgeError as error:
            complain(error)
            self._recover()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/image": self._image,
            "/method": self._method,
            "/stats": self._stats,
            "/save": self._save,
            "/clear": self._clear,
            "/help": lambda _: print(HELP, file=sys.stderr),
        }
        if name not in commands:
            raise unknown("command", name, [*commands, "/exit"])
        commands[name](rest.strip())

    def _image(self, path: str) -> None:
        path = _unquoted(path)
        if not path:
            raise UsageError("/image needs a path: /image photo.jpg")
        if not self._session.sees_images:
            raise UsageError("this model was loaded without an image encoder; start again with --mmproj")
        picture = load_picture(Path(path).expanduser())
        self._waiting.append(picture)
        print(f"{picture.name} ({picture.width} x {picture.height}) goes with the next message", file=sys.stderr)

    def _method(self, rest: str) -> None:
        words = rest.split()
        if not 1 <= len(words) <= 2:
            raise UsageError("/method needs a name, and takes a budget: /method lookm 0.2")
        plan = make_plan(*words)
        self._session.set_plan(plan)
        print(f"method {plan.method}, budget {plan.budget}, from the next message on", file=sys.stderr)

    def _stats(self, _: str) -> None:
        report = self._session.last_report
        if report is None:
            raise UsageError("nothing was asked yet")
        print(report.line(), file=sys.stderr)
        for group, figures in report.as_json().items():
            if isinstance(figures, dict):
                shown = ", ".join(
                    f"{name} {value}" for name, value in figures.items() if not isinstance(value, list | None)
                )
                print(f"  {group}: {shown}", file=sys.stderr)

    def _save(self, rest: str) -> None:
        path = Path(_unquoted(rest)).expanduser() if rest else self._file
        if path is None:
            raise UsageError("/save needs a file: /save talk.kvs")
        n_bytes = self._session.save(path)
        print(f"saved to {path}, {readable(n_bytes)}", file=sys.stderr)

    def _clear(self, _: str) -> None:
        self._loaded = False
        self._session.clear()
        self._waiting = []
        print("a new conversation", file=sys.stderr)


def _unquoted(path: str) -> str:
    return path[1:-1] if len(path) > 1 and path[0] == path[-1] and path[0] in "'\"" else path


def _read_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
