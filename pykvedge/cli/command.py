"""Commands whose options are shown in groups: `--help` shows common options, `--help-all` all options."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from pykvedge.cli import configured
from pykvedge.errors import KvedgeError

FEW = 16  # `--help` shows all options of a command with at most so many
_ALL = "kvedge.help_all"
_LAST = "Output"  # the last group of a help text
_JOINED = re.compile(r"-[a-z]{2}")  # click reads an unknown name of this form as a shorter option with a value
_LLAMA = dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "--kv-type")  # other names in llama.cpp
_NAMES = 26  # columns for the names of options in a help text


class Option(click.Option):
    """An option in a group. common: `--help` of a command with many options shows it.

    also: other accepted names, shown by `--help-all` only. config: `kvedge config` can set it.
    """

    def __init__(
        self, names: Sequence[str], *, group: str = _LAST, common: bool = False, also: Sequence[str] = (),
        config: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__([*names, *also], **settings)
        self.group, self.common, self.also, self.config = group, common, also, config

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        shown = copy.copy(self)
        if not ctx.meta.get(_ALL):
            shown.opts = [name for name in self.opts if name not in self.also]
        return click.Option.get_help_record(shown, ctx)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Returns the first name of the option, without its other names."""
        return f"'{self.opts[0]}'"


class Number(click.FloatRange):
    """A number within bounds. click's type accepts nan, which passes any bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number", param, ctx)
        return number


class Command(click.Command):
    """A command whose help groups its options, and whose options can be set in the configuration."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        extra.setdefault("default_map", configured.defaults(self, parent))
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except (click.UsageError, KvedgeError) as error:
            raise configured.blamed(self._misread(error, given), ctx) from None
        configured.settle(ctx)
        return rest

    def _misread(self, error: click.UsageError | KvedgeError, given: Sequence[str]) -> click.UsageError | KvedgeError:
        """Returns an error about a whole unknown option, where click read -ctk as -c with the value tk."""
        known = {name for param in self.params for name in param.opts}
        for word in given:
            name, begin, rest = word.partition("=")[0], word[:2], word[2:]
            if name in known or not (name in _LLAMA or _JOINED.match(name)):
                continue
            if isinstance(error, click.NoSuchOption):
                is_cause = error.option_name in (name, begin)
            else:
                is_cause = isinstance(error, click.BadParameter) and f"'{rest}'" in error.message
            if is_cause:
                ours = f". Did you mean '{_LLAMA[name]}'?" if name in _LLAMA else ""
                return click.UsageError(f"No such option '{name}'{ours}", getattr(error, "ctx", None))
        return error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvedgeError as error:
            raise configured.blamed(error, ctx) from error.__cause__

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        return [*params, _HELP_ALL] if self._is_long() else params

    def _is_long(self) -> bool:
        return sum(isinstance(param, Option) for param in self.params) > FEW

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        every = ctx.meta.get(_ALL) or not self._is_long()
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None and (every or getattr(param, "common", True)):
                groups.setdefault(getattr(param, "group", _LAST), []).append(record)
        lengths = [len(names) for rows in groups.values() for names, _ in rows]
        width = max((n for n in lengths if n <= _NAMES), default=0)
        for name, rows in sorted(groups.items(), key=lambda group: group[0] == _LAST):
            with formatter.section(name if len(groups) > 1 else "Options"):
                formatter.write_dl([(names.ljust(width), text) for names, text in rows], col_max=width)


def _show_all(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


_HELP_ALL = Option(
    ["--help-all"], common=True, is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
    help="Show all options and exit.",
)  # fmt: skip

command = partial(click.command, cls=Command)
option = partial(click.option, cls=Option)
