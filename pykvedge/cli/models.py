"""The command `kvedge models` lists and removes models in the cache."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from pykvedge.cli import options
from pykvedge.errors import UsageError, one_line

if TYPE_CHECKING:
    from pykvedge.models.hub import Removal


@click.group(invoke_without_command=True)
@options.JSON
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List the models in the cache, which -hf takes by name.

    The cache is that of llama.cpp and huggingface_hub: LLAMA_CACHE, HF_HUB_CACHE or HF_HOME name its folder, else it is
    ~/.cache/huggingface/hub.

    \b
    Examples:
      kvedge models
      kvedge models remove user/repo:Q8_0        what other models use stays
      kvedge models remove user/repo --yes       the whole repository
    """
    if context.invoked_subcommand is None:
        _list(as_json)
    elif as_json:
        raise UsageError(f"options of {context.invoked_subcommand} stand behind it")


@models.command()
@click.argument("name", metavar="USER/REPO[:QUANT]")
@click.option("--yes", is_flag=True, help="Do not ask.")
@options.JSON
def remove(name: str, yes: bool, as_json: bool) -> None:
    """Remove a model from the cache: one quantisation, or without QUANT the whole repository.

    An image encoder goes with the last model that uses it; files that other models use stay.
    """
    from pykvedge.models import hub
    from pykvedge.system.memory import readable

    found = hub.remove(name)
    if not yes and not _agreed(found):
        click.echo("nothing was removed", err=True)
        sys.exit(1)
    found.run()
    if as_json:
        click.echo(json.dumps({"name": str(found.name), "files": found.files, "bytes": found.bytes}))
    else:
        click.echo(f"removed {found.name}: {readable(found.bytes)}")


def _agreed(found: Removal) -> bool:
    from pykvedge.system.memory import readable

    if not _at_terminal():
        raise UsageError(f"removing {found.name} needs your word: pass --yes, as nobody sits at a terminal")
    for path in found.files:
        click.echo(f"  {path}", err=True)
    question = f"Remove {'all of ' if found.whole else ''}{found.name}, {readable(found.bytes)}?"
    return click.confirm(question, err=True)


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _list(as_json: bool) -> None:
    from pykvedge.cli.tables import markdown
    from pykvedge.models import hub
    from pykvedge.models.hub.cached import unfinished
    from pykvedge.system.memory import readable

    found, problems = hub.cached_models()
    begun = unfinished()
    for problem in problems:
        click.echo(f"kvedge: warning: {one_line(problem)}", err=True)
    if as_json:
        rows = [model.as_json() for model in found]
        click.echo(json.dumps({"cache": str(hub.cache_dir()), "models": rows, "unfinished": begun}))
        return
    if found:
        head = ["model", "size", "image encoder", "size"]
        table = [[m.name if m.quant else f"{m.repo} ({m.file})", readable(m.bytes), m.mmproj or "-",
                  readable(m.mmproj_bytes) if m.mmproj else "-"] for m in found]  # fmt: skip
        click.echo(markdown([head, *table]))
    else:
        click.echo(f"no models in {hub.cache_dir()}; `kvedge chat -hf USER/REPO` fetches one", err=True)
    for repo, n_bytes in begun.items():
        click.echo(f"{repo}: a download stopped after {readable(n_bytes)}; -hf {repo} goes on with it", err=True)
