"""Chatting: one question with its answer, or a conversation at the terminal."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pykvedge.display import Display
from pykvedge.errors import KvedgeError, UsageError, unknown
from pykvedge.images import Picture, load_picture
from pykvedge.interrupt import as_event, as_exception
from pykvedge.model import CancelledError
from pykvedge.presets import plan as make_plan
from pykvedge.report import Report
from pykvedge.sampling import Sampling
from pykvedge.session import Session

INTERRUPTED = 130

HELP = """\
/image PATH             add an image to the next message (jpg, png, webp, bmp, gif)
/method NAME [BUDGET]   compress the messages from now on by another method: /method lookm 0.2
/stats                  tokens, memory and time of the last answer
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

    def __init__(self, session: Session, sampling: Sampling, style: Style, display: Display) -> None:
        """session: should have been made with a `cancel` event, which Ctrl-C sets."""
        self._session, self._sampling, self._style, self._display = session, sampling, style, display
        self._cancel = session.cancel or threading.Event()
        self._waiting: list[Picture] = []  # for the next message

    def put(self, prompt: str, pictures: list[Picture]) -> Report:
        """Puts one message, streams the answer to stdout. Ctrl-C ends it; CancelledError if it had not begun."""
        with as_event(self._cancel):
            try:
                answer = self._session.ask(prompt, pictures, self._sampling)
            finally:
                self._display.done()
            try:
                for piece in answer:
                    if not self._style.as_json:
                        print(piece, end="", flush=True)
            finally:
                answer.close()
        return answer.report

    def once(self, prompt: str, pictures: list[Picture]) -> int:
        """One question. Returns the exit code: 130 if the answer was stopped."""
        report = self.put(prompt, pictures)
        if self._style.as_json:
            print(json.dumps(report.as_json()), flush=True)
        else:
            print(flush=True)
            self._show_line(report)
        return INTERRUPTED if report.finish == "cancelled" else 0

    def _show_line(self, report: Report) -> None:
        if not self._style.quiet:
            print(report.line(), file=sys.stderr, flush=True)

    # ---------------------------------------------------------------------------------------------------

    def converse(self, pictures: list[Picture]) -> int:
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
        except CancelledError:
            print("(stopped before the answer began)", file=sys.stderr)
        except KvedgeError as error:
            complain(error)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/image": self._image,
            "/method": self._method,
            "/stats": self._stats,
            "/clear": self._clear,
            "/help": lambda _: print(HELP, file=sys.stderr),
        }
        if name not in commands:
            raise unknown("command", name, [*commands, "/exit"])
        commands[name](rest.strip())

    def _image(self, path: str) -> None:
        if len(path) > 1 and path[0] == path[-1] and path[0] in "'\"":
            path = path[1:-1]
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
                shown = ", ".join(f"{name} {value}" for name, value in figures.items() if not isinstance(value, list))
                print(f"  {group}: {shown}", file=sys.stderr)

    def _clear(self, _: str) -> None:
        self._session.clear()
        self._waiting = []
        print("a new conversation", file=sys.stderr)


def _read_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
