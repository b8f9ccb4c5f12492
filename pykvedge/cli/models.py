"""The commands `kvedge pull`, `kvedge list` and `kvedge rm`: models in the cache."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from pykvedge.cli import completion, options
from pykvedge.cli.command import command, option
from pykvedge.cli.modelfiles import fetched
from pykvedge.cli.tables import markdown
from pykvedge.errors import UsageError, one_line
from pykvedge.system.memory import readable

if TYPE_CHECKING:
    from pykvedge.models.hub import Removal

_NAME = "USER/REPO[:QUANT]"


@command()
@click.argument("name", metavar=_NAME)
@options.taking(*options.HUB[1:3], options.JSON, options.QUIET)
def pull(name: str, **given: Any) -> None:
    """Fetch a model and its image encoder by name.

    -hf and `kvedge run` find the files in the cache. The default QUANT is Q4_K_M, else Q8_0. The paths of the files go
    to stdout. A stopped download is continued.

    \b
    Examples:
      kvedge pull ggml-org/SmolVLM-500M-Instruct-GGUF
      kvedge pull user/repo:Q8_0
    """
    model, mmproj = fetched(name, given)
    if given["as_json"]:
        click.echo(json.dumps({"name": name, "model": str(model), "mmproj": str(mmproj) if mmproj else None}))
    else:
        click.echo("\n".join(map(str, filter(None, (model, mmproj)))))


@command("rm")
@click.argument("name", metavar=_NAME, shell_complete=completion.models)
@option("--yes", is_flag=True, help="Remove without asking.")
@options.taking(options.JSON)
def remove(name: str, yes: bool, as_json: bool) -> None:
    """Remove a model from the cache.

    USER/REPO:QUANT removes one quantisation, USER/REPO the whole repository. An image encoder is removed with the last
    model that uses it. Files that other models use stay.

    \b
    Examples:
      kvedge rm user/repo:Q8_0        one quantisation
      kvedge rm user/repo --yes       the whole repository, without a question
    """
    from pykvedge.models import hub

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
    if not _at_terminal():
        raise UsageError(
            f"kvedge cannot ask before it removes {found.name}, because stdin is not a terminal; pass --yes"
        )
    for path in found.files:
        click.echo(f"  {path}", err=True)
    question = f"Remove {'all of ' if found.whole else ''}{found.name}, {readable(found.bytes)}?"
    return click.confirm(question, err=True)


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@command("list")
@options.taking(options.JSON)
def list_models(as_json: bool) -> None:
    """List the models in the cache, with their sizes.

    `kvedge run` takes them by name. llama.cpp and huggingface_hub use the same cache: LLAMA_CACHE, HF_HUB_CACHE
    or HF_HOME sets its folder; the default is ~/.cache/huggingface/hub. `kvedge pull` adds a model, `kvedge rm` removes
    one.
    """
    from pykvedge.models import hub
    from pykvedge.models.hub.cached import damage, unfinished

    there, problems = hub.cached_models()
    wrong = [damage(model) for model in there]
    found = [model for model, why in zip(there, wrong, strict=True) if not why]
    begun = unfinished()
    for problem in (*problems, *filter(None, wrong)):
        click.echo(f"kvedge: warning: {one_line(problem)}", err=True)
    if as_json:
        rows = [model.as_json() for model in found]
        click.echo(json.dumps({"cache": str(hub.cache_dir()), "models": rows, "unfinished": begun}))
        return
    if found:
        head = ["model", "size", "encoder"]
        table = [[m.name if m.quant else f"{m.repo} ({m.file})", readable(m.bytes),
                  readable(m.mmproj_bytes) if m.mmproj else "none"] for m in found]  # fmt: skip
        click.echo(markdown([head, *table]))
    else:
        click.echo(f"no models in {hub.cache_dir()}; `kvedge pull USER/REPO` downloads one", err=True)
    for repo, n_bytes in begun.items():
        click.echo(
            f"{repo}: the download stopped after {readable(n_bytes)}; `kvedge pull` with the same name continues "
            f"the download",
            err=True,
        )
