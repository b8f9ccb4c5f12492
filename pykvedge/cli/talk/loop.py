"""The loop of a conversation at a terminal: each line is a message or a command, until the user leaves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from pykvedge.cli.talk import commands
from pykvedge.cli.talk.chat import Chat, complain, say
from pykvedge.cli.talk.lines import Lines
from pykvedge.cli.talk.pictures import mentioned
from pykvedge.errors import KvedgeError, UsageError
from pykvedge.models.images import Picture
from pykvedge.runtime.interrupt import CancelledError, as_exception


def converse(chat: Chat, pictures: Sequence[Picture | Path], history: Path | None = None) -> int:
    """Runs until the user leaves; returns 0. pictures: of the first message. history: the file of past messages."""
    as_exception()
    chat.waiting = list(pictures)
    _introduce(chat)
    lines = Lines(functools.partial(commands.completions, chat), history)
    interrupts, begun = 0, ""
    while interrupts < 2:
        try:
            line = lines.message("> ", begun)
        except EOFError:
            print(file=sys.stderr)
            return 0
        except UnicodeError:
            complain("the line is not UTF-8 text; type the line again")
            continue
        except KeyboardInterrupt:
            interrupts += 1
            print(
                "(to end the program press Ctrl-C again or Ctrl-D, or type /exit)" if interrupts < 2 else "",
                file=sys.stderr,
            )
            continue
        interrupts = 0
        if line.lower() in commands.LEAVE:
            return 0
        begun = _respond(chat, line) if line else ""
    return 0


def _introduce(chat: Chat) -> None:
    plan = chat.session.plan
    if chat.loaded:
        chat.show_loaded()
    name = chat.session.model.path.name
    say(f"{name}, method {plan.method}, budget {plan.budget}. /help lists the commands.")


def _respond(chat: Chat, line: str) -> str:
    """Runs a line. Returns a message that was stopped before its answer began, for editing, or ""."""
    begun = line
    try:
        if commands.is_command(line):
            commands.run(chat, line)
        elif begun := _with_pictures(chat, line):
            chat.answer(begun)
    except (CancelledError, KeyboardInterrupt):
        images = "; the images stay attached" if chat.waiting else ""
        say(f"(stopped; edit the question and press Enter{images})")
        chat.recover()
        return begun
    except (KvedgeError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise  # no file failed: the output itself is unwritable
        complain(error)
        chat.recover()
    return ""


def _with_pictures(chat: Chat, line: str) -> str:
    """Adds the pictures in a message to the waiting pictures. Returns its text. Raises ImageError, UsageError."""
    found = mentioned(line, chat.next_image, chat.session.page_size)
    if found.pictures and not chat.session.sees_images:
        raise UsageError("the model was loaded without an image encoder; start kvedge again with --mmproj FILE")
    for hint in found.hints:
        say(f"kvedge: {hint}")
    for picture in found.pictures:
        wait = "" if found.text else ", sent with the next message"
        say(f"added {picture.name} as image {chat.next_image}{wait}")
        chat.waiting.append(picture)
    return found.text
