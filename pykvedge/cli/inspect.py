"""kvedge inspect."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import click

from pykvedge.errors import UsageError
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugin_files import load_file
from pykvedge.plans.presets import default_plan
from pykvedge.plans.presets import plan as make_plan

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("images", nargs=-1, type=_PATH)
@click.option("--prompt", default="Describe the image.", show_default=True, metavar="TEXT", help="What is asked.")
@click.option("--model", type=_PATH, metavar="FILE.gguf", help="Default: the packaged demo model.")
@click.option("--mmproj", type=_PATH, metavar="FILE.gguf", help="The image encoder that belongs to the model.")
@click.option("--method", "methods", multiple=True, metavar="NAME", help="What to show; repeatable. Default: mixkv.")
@click.option("--budget", metavar="AMOUNT",
              help="0.2 of the prompt, or 128 KV pairs per layer and head. Default: 0.2, with mixkv 0.5.")  # fmt: skip
@click.option("--plugin", "plugins", type=_PATH, multiple=True, metavar="FILE", help="As for kvedge chat.")
@click.option("--output", type=_PATH, default=Path("kvedge-inspect"), show_default=True, metavar="FOLDER")
@click.option("--figures/--no-figures", default=True, help="Whether to draw; the numbers are always written.")
@click.option("--threads", type=int, metavar="N", help="Default: one per physical core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: the files and a row per layer.")
@click.option("--quiet", is_flag=True, help="Nothing on stderr but errors.")
def inspect(images: tuple[Path, ...], **given: Any) -> None:
    """Draw what a KV cache looks like, and what a method keeps of it.

    Writes report.html, which needs nothing beside it, the same figures as PNG files, and data.npz with the numbers:
    kept patches over the images, budgets by layer and head, redundancy of the keys, how unevenly attention falls on
    the tokens, and energy by frequency. Figures need matplotlib: pip install 'kvedge[inspect]'.

    \b
    Examples:
      kvedge inspect photo.jpg --prompt "What is this?"
      kvedge inspect a.jpg b.jpg --method lookm --method prefixkv --budget 0.1 --output figures
      kvedge inspect photo.jpg --no-figures --json | jq .layers
    """
    from pykvedge.chat.session import Session
    from pykvedge.cli.chat import model_files, positive
    from pykvedge.cli.display import Display
    from pykvedge.lab.inspect import report
    from pykvedge.lab.inspect.collect import collect
    from pykvedge.models.images import load_picture
    from pykvedge.runtime.interrupt import as_event

    if given["figures"]:
        from pykvedge.lab.inspect.figures import require_matplotlib

        require_matplotlib()
    for file in given["plugins"]:
        load_file(file)
    plans = _plans(given)
    model, mmproj = model_files(given["model"], given["mmproj"])
    if images and mmproj is None:
        raise UsageError("images need the image encoder of the model: pass it with --mmproj")
    pictures = [load_picture(path.expanduser()) for path in images]
    display = Display(enabled=not given["quiet"])
    with as_event(threading.Event()) as cancel:
        try:
            session = Session(
                model,
                mmproj,
                plans[0],
                progress=display,
                cancel=cancel,
                threads=positive("--threads", given["threads"]),
            )
            with session:
                findings = collect(session, given["prompt"], pictures, plans)
        finally:
            display.done()
    files = report.write(findings, given["output"], given["figures"])
    if given["as_json"]:
        click.echo(json.dumps(_as_object(findings, files, report.table(findings))))
    else:
        click.echo("\n".join(str(f) for f in files))


def _plans(given: dict[str, Any]) -> list[Plan]:
    names = given["methods"]
    if len(set(names)) < len(names):
        raise UsageError("--method names a method twice")
    return [make_plan(name, given["budget"]) for name in names] or [default_plan(given["budget"])]


def _as_object(findings: Any, files: list[Path], rows: list[list[str]]) -> dict[str, Any]:
    names = ["layer", "redundancy", "gini", "outlier_ratio"]
    return {
        "files": [str(f) for f in files],
        "tokens": {"prompt": findings.n_tokens, "image": int(findings.image_mask.sum())},
        "layers": [dict(zip(names, map(float, row[:4]), strict=True)) for row in rows],
        "budgets": {method: findings.budgets(method).tolist() for method in findings.kept},
    }
