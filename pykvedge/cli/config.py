"""The command `kvedge config` shows and changes the values of omitted options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from pykvedge.cli import completion, configured, options, paths
from pykvedge.cli.command import Command
from pykvedge.cli.modelfiles import NONE, as_name
from pykvedge.errors import SaveError, UsageError, unknown
from pykvedge.reference.kvtypes import KvType
from pykvedge.system.files import is_there, write_whole


@click.group(invoke_without_command=True)
@options.JSON
@click.pass_context
def config(context: click.Context, as_json: bool) -> None:
    """Set default values of options.

    An omitted option takes the variable KVEDGE_NAME of the environment, then the configuration file, then its default.
    chat, run, serve and fit use all settings. bench, eval, inspect, calibrate and tune use only model, mmproj, threads,
    gpu-layers, device and rpc, so figures do not change with the configuration. Python's Session uses none.

    \b
    Examples:
      kvedge config set model ~/models/qwen.gguf
      kvedge config set method lookm
      kvedge config set gpu-layers auto
      KVEDGE_THREADS=4 kvedge chat "Hello"
      kvedge config                     all settings, and where each is set
      kvedge config unset method
    """
    if context.invoked_subcommand is None:
        _show(as_json)
    elif as_json:
        raise UsageError(f"--json is in the wrong place; write --json after {context.invoked_subcommand}")


def _complete(context: click.Context, _: Any, begun: str) -> list[completion.CompletionItem]:
    known = sorted(configured.all_keys(context.find_root().command))
    return [completion.CompletionItem(key) for key in known if key.startswith(begun)]


@config.command(cls=Command)
@options.JSON
def show(as_json: bool) -> None:
    """Show every setting and where it is set."""
    _show(as_json)


def _show(as_json: bool) -> None:
    found = configured.settings(_known())
    if as_json:
        rows = {key: {"value": one.value, "from": one.source} for key, one in sorted(found.items())}
        click.echo(json.dumps({"file": str(configured.file()), "settings": rows}))
        return
    for key, one in sorted(found.items()):
        click.echo(f"{_line(key, one.value)}  # {one.source}")
    if not found:
        keys = ", ".join(sorted(_known()))
        click.echo(
            f"{configured.file()} has no settings; set one with `kvedge config set KEY VALUE`, where KEY is "
            f"one of {keys}",
            err=True,
        )


@config.command(cls=Command)
def path() -> None:
    """Print the path of the configuration file."""
    click.echo(configured.file())


@config.command("set", cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("key", shell_complete=_complete)
@click.argument("value")
def set_key(key: str, value: str) -> None:
    """Set an option, named without its dashes.

    The value is checked like a value of the option. Paths are stored as absolute paths.

    \b
    Examples:
      kvedge config set model user/repo:Q4_K_M
      kvedge config set threads 4
    """
    known = _known()
    if key not in known:
        raise unknown("key", key, known)
    value = _checked(key, value, known[key])
    _rewrite(key, _line(key, value))


@config.command(cls=Command)
@click.argument("key", shell_complete=_complete)
def unset(key: str) -> None:
    """Remove a setting from the file."""
    if key not in configured.stored():
        raise UsageError(f"{key} is not set in {configured.file()}; `kvedge config` lists the settings")
    _rewrite(key, None)


def _known() -> dict[str, list[tuple[click.Command, click.Parameter]]]:
    return configured.all_keys(click.get_current_context().find_root().command)


def _checked(key: str, text: str, takers: list[tuple[click.Command, click.Parameter]]) -> Any:
    """Returns the value for the file. Raises UsageError, or click's error, for a value that an option would refuse."""
    value: Any = text
    root = click.get_current_context().find_root()
    for taker, param in takers:
        one = param.type.convert(text, param, click.Context(taker, root, taker.name))
        value = one if isinstance(one, (bool, int, float)) else text
        if isinstance(one, Path) and not (key == "model" and as_name(one) is not None) and text not in NONE:
            value = str(paths.expanded(one).absolute())
            if key in ("model", "mmproj") and not paths.ask(Path.exists, Path(value)):
                raise UsageError(f"{value} does not exist")
    if check := _CHECKS.get(key):
        check(value)
    return value


def _check_sampling(key: str, value: Any) -> object:
    from pykvedge.runtime.sampling import Sampling

    return Sampling(**{key.replace("-", "_"): value})


_CHECKS: dict[str, Callable[[Any], object]] = {
    "method": lambda name: options.make_plan(name, None), "kv-type": KvType.parse,
    "budget": lambda budget: options.make_plan(options.DEFAULT_METHOD, str(budget)),
    **{key: lambda text, key=key: options.size(key, text) for key in ("cache-size", "keep-space", "memory")},  # type: ignore[misc]
    **{key: partial(_check_sampling, key) for key in ("temp", "top-p", "top-k", "min-p", "repeat-penalty",
                                                      "max-tokens")},
}  # fmt: skip


def _line(key: str, value: Any) -> str:
    """Returns a line of TOML. Its texts, numbers and booleans have the form of JSON."""
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def _rewrite(key: str, line: str | None) -> None:
    """Replaces, adds or removes the line of a key. Comments and the order of other lines stay. Raises SaveError."""
    before, path = configured.stored(), configured.file()
    lines = path.read_text(encoding="utf-8").splitlines() if before or is_there(path) else []
    mine = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
    kept = [line if mine.match(old) else old for old in lines] if key in before else [*lines, line]
    text = "".join(f"{one}\n" for one in kept if one is not None)
    wanted = {name: value for name, value in before.items() if name != key}
    if line is not None:
        wanted |= configured.parsed(line)
    try:
        if configured.parsed(text) != wanted:
            raise ValueError
        write_whole(path, text)
    except ValueError:
        raise UsageError(
            f"kvedge cannot change {key} in {path}, because the line has an unusual form; edit the file"
        ) from None
    except OSError as error:
        raise SaveError(f"the configuration {path} cannot be written: {error.strerror or error}") from None
