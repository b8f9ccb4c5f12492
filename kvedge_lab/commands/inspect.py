"""The command `kvedge inspect` draws what a KV cache holds."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import click

from kvedge_lab.commands import common
from pykvedge.cli import modelfiles, options
from pykvedge.cli.command import command, option
from pykvedge.cli.progress import Display
from pykvedge.errors import LibraryError, UsageError
from pykvedge.plans.plan import Plan


@command()
@click.argument("files", nargs=-1, type=common.PATH, metavar="[IMAGES]...")
@options.taking(
    option("--prompt", group="Picture", common=True, default="Describe the image.", show_default=True, metavar="TEXT",
           help="The question."),
    options.MODEL,
    options.MMPROJ,
    *options.HUB,
    options.IMAGE,
    common.METHODS,
    options.BUDGET,
    *options.CHANGES,
    options.PLAN,
    options.PLUGIN,
    options.PROFILE,
    options.CTX,
    options.THREADS,
    *options.DEVICES,
    common.output("The folder for the report.", default=Path("kvedge-inspect"), show_default=True, metavar="FOLDER"),
    option("--format", "form", group="Output", type=click.Choice(["png", "svg", "pdf"]), default="png",
           show_default=True, help="The file format of the figures."),
    option("--figures/--no-figures", group="Output", common=True, default=True,
           help="Whether to draw figures. The numbers are always written."),
    options.JSON,
    options.QUIET,
)  # fmt: skip
def inspect(files: tuple[Path, ...], **given: Any) -> None:
    """Draw a KV cache, and the KV pairs that a method keeps.

    Writes report.html (self-contained), its figures as files for the column of a paper, and data.npz with the numbers.
    The figures: kept patches over the images, for all layers together and for each; budgets by layer and head, with
    several methods side by side; redundancy of the keys; how unevenly attention falls on the tokens; and energy by
    frequency. Figures need matplotlib: pip install 'kvedge[inspect]'.

    \b
    Examples:
      kvedge inspect photo.jpg --prompt "What is this?"
      kvedge inspect --image a.jpg --method kvedge --method snapkv --format pdf
      kvedge inspect photo.jpg --no-figures --json | jq .layers
    """
    from kvedge_lab.drawing import can_draw
    from kvedge_lab.inspect import report
    from kvedge_lab.inspect.collect import collect
    from pykvedge.chat.session import Session
    from pykvedge.runtime.interrupt import as_event

    if given["figures"] and not can_draw():
        raise LibraryError("figures need matplotlib: pip install 'kvedge[inspect]', or pass --no-figures")
    common.check_folder(given["output"])
    options.load_plugins(given)
    plans = _plans(given)
    model, mmproj = modelfiles.model_files(given)
    images = [*files, *given["images"]]
    if images and mmproj is None:
        raise UsageError("images need the image encoder of the model: pass it with --mmproj")
    pictures = list(modelfiles.pictures(images, mmproj))
    settings = options.running(given) | {"profile": given["profile"]}
    with (
        as_event(threading.Event()) as cancel,
        Display(enabled=not given["quiet"]) as display,
        Session(model, mmproj, plans[0], progress=display, cancel=cancel, **settings) as session,
    ):
        findings = collect(session, given["prompt"], pictures, plans)
    written = report.write(findings, given["output"], given["figures"], given["form"])
    if given["as_json"]:
        click.echo(json.dumps(_as_object(findings, written, report.table(findings))))
    else:
        click.echo("\n".join(str(f) for f in written))


def _plans(given: dict[str, Any]) -> list[Plan]:
    names = given["methods"]
    if len(set(names)) < len(names):
        raise UsageError("--method names a method twice; name each method once")
    return [options.chosen_plan({**given, "method": name}) for name in names or [None]]


def _as_object(findings: Any, files: list[Path], rows: list[list[str]]) -> dict[str, Any]:
    names = ["layer", "redundancy", "gini", "outlier_ratio"]
    return {
        "files": [str(f) for f in files],
        "tokens": {"prompt": findings.n_tokens, "image": int(findings.image_mask.sum())},
        "layers": [dict(zip(names, map(float, row[:4]), strict=True)) for row in rows],
        "budgets": {method: findings.lengths(method) for method in findings.kept},
    }
