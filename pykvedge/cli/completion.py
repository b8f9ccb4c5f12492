"""The command `kvedge completion`, and the completions of methods, stages, settings and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from pykvedge.cli.command import command
from pykvedge.errors import KvedgeError
from pykvedge.plans import presets, registry
from pykvedge.plans.making import plan

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that lets Tab complete commands, options, methods, models and files.

    \b
    bash, in ~/.bashrc:
      eval "$(kvedge completion bash)"
    zsh, in ~/.zshrc, behind compinit:
      eval "$(kvedge completion zsh)"
    fish, once:
      kvedge completion fish > ~/.config/fish/completions/kvedge.fish
    """
    script = get_completion_class(shell)
    if script is not None:
        click.echo(script(context.find_root().command, {}, "kvedge", "_KVEDGE_COMPLETE").source())


def _among(names: Iterable[str], begun: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(begun)]


def of(names: Callable[[], Iterable[str]]) -> Complete:
    """Returns a completion function for fixed names."""
    return lambda _, __, begun: _among(names(), begun)


def methods(_: Any, __: Any, begun: str) -> list[CompletionItem]:
    """Completes names of methods, also the last name of a list with commas."""
    before, comma, last = begun.rpartition(",")
    names = [name for name in presets.methods() if name.startswith(last)]
    return [CompletionItem(before + comma + name, help=presets.preset(name).summary) for name in names]


def members(_: Any, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completes the members of the stage that the option is named after."""
    return _among(registry.members(param.name or ""), begun)


def settings(context: click.Context, _: Any, begun: str) -> list[CompletionItem]:
    """Completes --set with the settings of the chosen method's stages."""
    with suppress(KvedgeError):
        made = plan(context.params.get("method") or presets.DEFAULT_METHOD)
        chosen = {stage: context.params.get(stage) or getattr(made, stage) for stage in registry.STAGES}
        found = [(stage, one) for stage, name in chosen.items() for one in registry.member(stage, name).params]
        named = [CompletionItem(f"{stage}.{one.name}=", help=one.help) for stage, one in found]
        return [item for item in named if item.value.startswith(begun)]
    return []


def models(_: Any, __: Any, begun: str) -> list[CompletionItem]:
    """Completes names of models in the cache."""
    from pykvedge.models import hub

    with suppress(KvedgeError, OSError):
        return _among((model.name for model in hub.cached_models()[0]), begun)
    return []


def files_or_models(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completes names of models in the cache; if none matches, files."""
    return models(context, param, begun) or [CompletionItem(begun, type="file")]
