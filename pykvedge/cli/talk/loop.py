"""A conversation at a terminal takes what is typed as a message or a command, until the user leaves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from pykvedge.cli.talk import commands
from pykvedge.cli.talk.chat import Chat, complain
from pykvedge.cli.talk.lines import Lines
from pykvedge.errors import KvedgeError, printable
from pykvedge.models.images import Picture
from pykvedge.runtime.interrupt import CancelledError, as_exception


def converse(chat: Chat, pictures: Sequence[Picture | Path], history: Path | None = None) -> int:
    """Talks until the user leaves. pictures: they go with the first message. history: the file that keeps lines."""
    as_exception()
    chat.waiting = list(pictures)
    _introduce(chat)
    interrupts = 0
    with Lines(functools.partial(commands.completions, chat), history) as lines:
        while interrupts < 2:
            try:
                line = lines.message("> ")
            except EOFError:
                print(file=sys.stderr)
                return 0
            except UnicodeDecodeError:
                complain("the line is no UTF-8 text")
                continue
            except KeyboardInterrupt:
                interrupts += 1
                print("\n(Ctrl-C again, Ctrl-D or /exit leave)" if interrupts < 2 else "", file=sys.stderr)
                continue
            interrupts = 0
            if line in commands.LEAVE:
                return 0
            if line:
                _respond(chat, line)
    return 0


def _introduce(chat: Chat) -> None:
    plan = chat.session.plan
    if chat.loaded:
        chat.show_loaded()
    name = printable(chat.session.model.path.name)
    print(f"{name}, method {plan.method}, budget {plan.budget}. /help lists the commands.", file=sys.stderr)


def _respond(chat: Chat, line: str) -> None:
    try:
        if line.startswith("/"):
            commands.run(chat, line)
        else:
            chat.answer(line, chat.waiting)
            chat.waiting = []
    except (CancelledError, KeyboardInterrupt):
        print("(stopped)", file=sys.stderr)
        chat.recover()
    except (KvedgeError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise  # not of a path: what is printed reaches nobody
        complain(error)
        chat.recover()
