"""The commands of a conversation (/image, /retry, ...), with their help and completion."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pykvedge.cli import paths, sampling
from pykvedge.cli.talk.chat import Chat
from pykvedge.cli.talk.chat import say as _say
from pykvedge.cli.talk.pictures import looks_like_path
from pykvedge.errors import UsageError, unknown
from pykvedge.models.documents import load_pictures
from pykvedge.models.prompt import Message
from pykvedge.native import crash
from pykvedge.plans.making import another
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.plan import AUTO, Plan
from pykvedge.plans.presets import methods
from pykvedge.plans.registry import STAGES, member
from pykvedge.reference.stages.base import Param
from pykvedge.system.memory import readable
from pykvedge.system.shown import counted

LEAVE = ("/exit", "/quit", "/bye", "exit", "quit")

_LAST_WORD = re.compile(r"""(?<!\S)(?:'[^']*|"[^"]*|(?:\\.|[^\s'"\\])+)\Z""")  # quotes may be open

# Fields of the plan, checked like the options with these names. None: the plan parses the text.
_SINKS = Param("sinks", 0, "the number of first tokens that are always kept")
_TEXT_PRIOR = Param("text_prior", False, "keep text before image tokens")
_OF_PLAN = {"recent": None, "sinks": _SINKS, "text_prior": _TEXT_PRIOR, "critical": None, "critical_half": None}


@dataclass(frozen=True)
class Command:
    """A command. usage: the command with its arguments. complete: returns completions of a half-typed argument."""

    usage: str
    help: str
    run: Callable[[Chat, str], None]
    complete: Callable[[Chat, str], list[str]] = lambda chat, begun: []

    @property
    def name(self) -> str:
        return self.usage.split()[0]


def run(chat: Chat, line: str) -> None:
    """Runs the command in a line that begins with a slash. Raises KvedgeError."""
    name, rest = (*line.split(maxsplit=1), "")[:2]
    name = "/help" if name == "/?" else name
    if name in LEAVE:
        _nothing_after(name, rest)
    if name not in COMMANDS:
        raise unknown("command", name, [*COMMANDS, LEAVE[0]])
    COMMANDS[name].run(chat, rest.strip())


def is_command(line: str) -> bool:
    """Returns whether a line is a command, and not a message that begins with the path of a picture."""
    return line.startswith("/") and not looks_like_path(line.split()[0])


def completions(chat: Chat, line: str) -> list[str]:
    """Returns completions of a half-typed line: commands, their arguments, and paths in a message."""
    name, blank, begun = line.partition(" ")
    if not blank and name.startswith("/") and not looks_like_path(name):
        takes = {c.name: c.name + (" " if " " in c.usage else "") for c in COMMANDS.values()}
        if found := [whole for known, whole in {**takes, LEAVE[0]: LEAVE[0]}.items() if known.startswith(name)]:
            return found
    if blank and name in COMMANDS:
        return [f"{name} {found}" for found in COMMANDS[name].complete(chat, begun.lstrip())]
    word = _LAST_WORD.search(line)
    return [line[: word.start()] + found for found in paths.completions(word[0])] if word else []


def _image(chat: Chat, rest: str) -> None:
    if not rest:
        raise UsageError("/image needs a path, for example /image photo.jpg")
    if not chat.session.sees_images:
        raise UsageError("the model was loaded without an image encoder; start kvedge again with --mmproj FILE")
    loaded = list(load_pictures(paths.typed(rest), chat.session.page_size))
    number, one = chat.next_image, loaded[0]
    chat.waiting += loaded
    if len(loaded) == 1:
        _say(f"image {number}: {one.name} ({one.width} x {one.height}), sent with the next message")
    else:
        pages = f"{len(loaded)} pages of {one.name.rpartition(', page ')[0]}"
        _say(f"images {number} to {chat.next_image - 1}: {pages}, sent with the next message")


def _use(chat: Chat, plan: Plan) -> None:
    chat.session.set_plan(plan)
    _say(f"method {plan.method}, budget {plan.budget}, from the next message on")


def _method(chat: Chat, rest: str) -> None:
    words = rest.split()
    if not 1 <= len(words) <= 2:
        raise UsageError("/method needs a name and takes a budget, for example /method lookm 0.2")
    _use(chat, another(chat.session.plan, *words))


def _budget(chat: Chat, rest: str) -> None:
    if len(rest.split()) != 1:
        raise UsageError("/budget needs a share of the prompt (/budget 0.2) or a number of KV pairs (/budget 128)")
    if chat.session.plan.method == "full":
        make_plan("full", rest)  # raises the error for a budget of method full
    _use(chat, chat.session.plan.with_(budget=rest))


def _set(chat: Chat, rest: str) -> None:
    if not rest:
        for name, value in _settings(chat).items():
            _say(f"  {name} {value}")
        return
    name, value = (*re.split(r"\s*=\s*|\s+", rest, maxsplit=1), "")[:2]
    if not value or (name not in sampling.TEXTS and len(value.split()) > 1):
        raise UsageError("/set needs a name and a value, for example /set temp 0.7 or /set scorer.window 16")
    known = _settings(chat)
    if name not in known and "." not in name:
        raise unknown("setting", name, known)
    plan = chat.session.plan
    if "." in name:
        chat.session.set_plan(plan.with_(params={**plan.params, name: value}))
    elif name in _OF_PLAN:
        kind = _OF_PLAN[name]
        chat.session.set_plan(plan.with_(**{name: value if kind is None else kind.check(value, name)}))
    else:
        given: dict[str, Any] = {name: sampling.read(name, value)}
        chat.sampling = replace(chat.sampling, **given)
    _say(f"{name} {_settings(chat)[name]}, from the next message on")


def _settings(chat: Chat) -> dict[str, object]:
    """Returns name -> value of all settings that /set can change."""
    plan = chat.session.plan
    out = {name: sampling.shown(chat.sampling, name) for name in sampling.SETTINGS}
    out.update({name: _shown(getattr(plan, name)) for name in _OF_PLAN})
    for stage in STAGES:
        values = plan.settings(stage)
        out.update({f"{stage}.{p.name}": values[p.name] for p in member(stage, getattr(plan, stage)).params})
    return {name: "random" if value is None else value for name, value in out.items()}


def _shown(value: object) -> object:
    """Returns a value of the plan as users type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return AUTO if value is None else value


def _retry(chat: Chat, rest: str) -> None:
    _nothing_after("/retry", rest)
    chat.retry()


def _undo(chat: Chat, rest: str) -> None:
    _nothing_after("/undo", rest)
    _say(f"removed the last message and its answer: {_shown_message(chat.undo())}")


def _drop(chat: Chat, rest: str) -> None:
    if not rest.isdecimal() or len(rest) > 9:
        raise UsageError("/drop needs the number of a message, for example /drop 2")
    _say(f"removed message {rest} and its answer: {_shown_message(chat.session.drop_turn(int(rest)))}")


def _shown_message(message: Message) -> str:
    text = " ".join(message.text.split())
    n = len(message.pictures)
    images = f" and its {counted(n, 'image')}" if n else ""
    return (text if len(text) <= 60 else text[:57] + "...") + images


def _nothing_after(name: str, rest: str) -> None:
    if rest:
        raise UsageError(f"{name} takes no value; type {name} alone")


def _stats(chat: Chat, _: str) -> None:
    report = chat.session.last_report
    if report is None:
        raise UsageError("no question was asked yet; type a question first")
    _say(report.line())
    for group, figures in report.as_json().items():
        if isinstance(figures, dict):
            told = ((name, value) for name, value in figures.items() if not isinstance(value, list | None))
            shown = ", ".join(f"{name} {value}" for name, value in told)
            _say(f"  {group}: {shown}")
    if chat.session.undo_bytes:
        _say(f"  undo: {readable(chat.session.undo_bytes)} for the copy of the cache before the last message")


def _save(chat: Chat, rest: str) -> None:
    path = paths.typed(rest) if rest else chat.file
    if path is None:
        raise UsageError("/save needs a file, for example /save talk.kvs")
    with chat.holding(path):
        n_bytes = chat.save(path)
        crash.saved(path)
    _say(f"saved to {path}, {readable(n_bytes)}")


def _clear(chat: Chat, _: str) -> None:
    chat.clear()
    _say("started a new conversation")


def _help(_: Chat, __: str) -> None:
    width = max(len(c.usage) for c in COMMANDS.values()) + 2
    for command in COMMANDS.values():
        _say(f"{command.usage:<{width}}{command.help}")
    _say(f"{LEAVE[0]:<{width}}end the program, like /bye, exit, Ctrl-D, or Ctrl-C twice")
    _say(_MORE_HELP)


_MORE_HELP = """
Any other line is a message to the model. To add a picture (jpg, png, webp, bmp,
gif), drag, paste or type its path. Write <image> at the place of an image, and
\\<image> for the word itself.

Several lines: Alt-Enter, a backslash at the end, or three double quotes (\"\"\")
before the first line and after the last. Tab completes commands and paths.
Ctrl-C stops an answer, or clears what is typed."""


def _complete_path(_: Chat, begun: str) -> list[str]:
    return paths.completions(begun)


_ALL = (
    Command("/image PATH", "add an image to the next message, or pages of a PDF: a.pdf[3-7]", _image, _complete_path),
    Command("/retry", "send the last message again, with the current settings", _retry),
    Command("/undo", "remove the last message and its answer", _undo),
    Command("/drop N", "remove message N and its answer (needs --keep; not the first or last message)", _drop),
    Command("/method NAME [BUDGET]", "compress later messages with another method: /method lookm 0.2", _method,
            lambda _, begun: [name for name in methods() if name.startswith(begun)]),
    Command("/budget AMOUNT", "keep a share (0.2) or a number of KV pairs (128) of later messages", _budget),
    Command("/set [NAME VALUE]", "change a setting: /set temp 0.7; /set alone lists all settings", _set,
            lambda chat, begun: [f"{name} " for name in _settings(chat) if name.startswith(begun)]),
    Command("/stats", "show tokens, memory and time of the last answer", _stats),
    Command("/save [FILE]", "write the conversation to a file, for --session FILE", _save, _complete_path),
    Command("/clear", "start a new conversation", _clear),
    Command("/help", "show this list", _help),
)  # fmt: skip
COMMANDS = {command.name: command for command in _ALL}
