"""The command `kvedge bench` measures speed and memory of methods beside stock llama.cpp."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from kvedge_lab.commands import common
from kvedge_lab.progress import Steps
from pykvedge.cli import options
from pykvedge.cli.command import command, option
from pykvedge.cli.modelfiles import fetched, model_files
from pykvedge.cli.options import listed
from pykvedge.errors import UsageError
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.presets import methods as method_names
from pykvedge.reference.kvtypes import KEEP_TYPES, KvType
from pykvedge.system.shown import counted

if TYPE_CHECKING:
    from kvedge_lab.bench.matrix import Matrix, ModelFiles, Shape, Variant

OUTPUTS = ("md", "csv", "json", "jsonl")
DEFAULTS: dict[str, Any] = {"budgets": "0.5,0.2", "tokens": "64", "images": "2,8", "repeat": 5, "generate": 32}
FILL_S = 10.0  # a prompt's rounds are repeated until they take this long
QUICK: dict[str, Any] = {"budgets": "0.2", "tokens": "64", "images": "8", "repeat": 3, "generate": 16}


@command()
@options.taking(
    option("--quick", group="Measurement", common=True, is_flag=True, help="Measure one prompt and one budget in "
    "fewer rounds."),
    common.MODELS,
    common.MMPROJS,
    *common.HUBS,
    common.METHOD_LIST,
    common.budget_list(f"{DEFAULTS['budgets']}; {QUICK['budgets']} with --quick"),
    options.PLUGIN,
    option("--tokens", group="Prompts", common=True, metavar="N,M",
           help=f"The number of text tokens of each prompt. Default: {DEFAULTS['tokens']}."),
    option("--images", group="Prompts", common=True, metavar="N,M",
           help=f"The number of images of each prompt. Default: {DEFAULTS['images']}; 0 without --mmproj; "
                f"{QUICK['images']} with --quick."),
    option("--image-size", group="Prompts", default="336x336", show_default=True, metavar="WxH",
           help="The image size in pixels."),
    option("--image-tokens", "image_tokens", group="Prompts", metavar="A,B",
           help="Also measure every method with these shares of each image's tokens, for example 0.5,0.25."),
    option("--pruner", group="Prompts", default="residual", show_default=True, metavar="NAME",
           help="The pruner that chooses the tokens of --image-tokens."),
    option("--again", group="Measurement", is_flag=True, help="Also time a second conversation about the same images."),
    option("--later", group="Measurement", type=common.COUNT, default=None, metavar="N",
           help="Also time a later message of N tokens, after the answer."),
    option("--keep", group="What is kept", type=click.Choice(("ram", "disk")),
           help="Also measure each method with `kvedge chat --keep` in memory (ram) or in a file (disk); see --later."),
    option("--keep-type", group="What is kept", type=click.Choice(KEEP_TYPES),
           help="The type in which --keep stores KV rows: f16 (the default, exact) or q8_0 (rounded)."),
    option("--device-peak", group="Measurement", is_flag=True,
           help="Also measure the peak memory of GPUs, with one more run of each method."),
    option("--kv-type", "kv_types", group="Memory and devices", default="f16", show_default=True, metavar="A,B",
           help="The KV types; stock uses f16."),
    option("--repeat", group="Measurement", common=True, type=common.COUNT, metavar="N",
           help=f"The number of rounds. Default: {DEFAULTS['repeat']}, with --quick {QUICK['repeat']}, and more "
                f"until a prompt takes {FILL_S:.0f} s."),
    option("--generate", group="Measurement", type=common.COUNT, metavar="N",
           help=f"The number of tokens generated in each round. Default: {DEFAULTS['generate']}, with --quick "
                f"{QUICK['generate']}."),
    options.THREADS,
    *options.DEVICES,
    common.output("Write the table to this file instead of stdout: .md, .csv, .json or .jsonl.", metavar="FILE"),
    options.JSON,
    option("--save", group="Output", type=common.PATH, metavar="FILE.jsonl",
           help="Save each round in this file when it is measured, one per line."),
    option("--plot", group="Output", common=True, type=common.PATH, metavar="FILE",
           help="Plot the table: .png, .svg, .pdf or .html; needs matplotlib."),
    option("--memory-plot", group="Output", type=common.PATH, metavar="FILE",
           help="Plot memory over time for stock and each method, with one more run of each; needs matplotlib."),
    options.QUIET,
)  # fmt: skip
def bench(**given: Any) -> None:
    """Measure speed and memory of methods beside stock llama.cpp.

    Every method reads the same synthetic prompts (random text, drawn scenes) and generates. Rounds alternate between
    the methods, so a change of the machine's speed affects all of them.

    \b
    Examples:
      kvedge bench --quick          two minutes at most, on the packaged model
      kvedge bench -m m.gguf --images 1,4 --method lookm --plot bench.svg
      kvedge bench -hf user/repo:Q4_K_M --quick
      kvedge bench --plugin mine.py --method snapkv,mine
      kvedge bench -m m.gguf --tokens 512,8192 --output speed.csv

    Exit code: 0, or 1 if something was left out (stderr says what), or 130 after Ctrl-C; both print the table.
    """
    sys.exit(_run(given))


def _run(given: dict[str, Any]) -> int:
    from kvedge_lab import drawing
    from kvedge_lab.bench import plot
    from kvedge_lab.bench.runner import Outcome, new_log, run
    from kvedge_lab.jsonlines import SaveError
    from pykvedge.runtime.interrupt import as_event

    options.load_plugins(given)
    common.check_table(given["output"], OUTPUTS)
    matrix = _matrix(given)
    if given["plot"] is not None:
        plot.check(given["plot"])
    if given["memory_plot"] is not None:
        drawing.check("--memory-plot", given["memory_plot"])
    log, outcome = new_log(given["save"]), Outcome()
    display = Steps(enabled=not given["quiet"], steps=matrix.steps)
    try:
        with closing(log), display, as_event(threading.Event()) as cancel:
            run(matrix, log, outcome, display, cancel)
    except SaveError:
        _print(outcome, given)
        raise
    _print(outcome, given)
    return 130 if outcome.interrupted else 1 if outcome.left_out else 0


def _print(outcome: Any, given: dict[str, Any]) -> None:
    from kvedge_lab.bench import plot, table, timeline

    made = table.rows(outcome) if outcome.bandwidth is not None else []
    forms = {
        "md": lambda: table.as_markdown(made, outcome) if made else "",
        "csv": lambda: common.as_csv(made, "_spread"),
        "json": lambda: table.as_json(made, outcome),
        "jsonl": lambda: table.as_jsonl(made),
    }
    common.write_table(given, forms)
    for warning in table.warnings(made):
        click.echo(f"kvedge: warning: {warning}", err=True)
    if given["plot"] is not None and made:
        plot.write(given["plot"], made, [*table.warnings(made), *table.NOTES])
    if given["memory_plot"] is not None and not timeline.draw(given["memory_plot"], outcome.traces):
        click.echo("kvedge: the memory plot was not written, because no run finished", err=True)


def _matrix(given: dict[str, Any]) -> Matrix:
    from kvedge_lab.bench.matrix import Matrix
    from pykvedge.runtime.settings import MAX_CTX

    usual = QUICK if given["quick"] else DEFAULTS
    chosen = {name: usual[name] if given[name] is None else given[name] for name in usual}
    models = _models(given)
    if given["images"] is None and not all(files.mmproj for files in models):
        chosen["images"] = "0"
    shapes = _shapes(chosen, given["image_size"])
    if any(shape.images for shape in shapes) and not all(files.mmproj for files in models):
        raise UsageError("prompts with images need --mmproj for every --model; pass --mmproj, or --images 0")
    variants = _variants(given, str(chosen["budgets"]))
    largest = max(shapes, key=lambda shape: shape.assumed_tokens)
    if largest.assumed_tokens >= MAX_CTX:
        raise UsageError(f"a prompt of {largest.name} is too long; use fewer --tokens or --images")
    _check_names("models", (files.name for files in models))
    _check_names("prompts", (shape.name for shape in shapes))
    _check_names("variants", (variant.label for variant in variants))
    return Matrix(
        models,
        shapes,
        variants,
        chosen["repeat"],
        FILL_S if given["repeat"] is None else 0.0,
        chosen["generate"],
        given["threads"] or 0,
        options.offload(given, largest.assumed_tokens),
        again=given["again"],
        timeline=given["memory_plot"] is not None,
        device_peak=given["device_peak"],
        later=given["later"] or 0,
    )


def _check_names(what: str, names: Iterable[str]) -> None:
    """Raises UsageError for a duplicate name, because names identify rows and group rounds."""
    for name, n in Counter(names).items():
        if n > 1:
            raise UsageError(
                f"{n} {what} have the same name '{name}', so the table cannot distinguish them; omit or rename one"
            )


def _models(given: dict[str, Any]) -> list[ModelFiles]:
    from kvedge_lab.bench.matrix import ModelFiles

    models, mmprojs, by_name = given["models"], given["mmprojs"], given["hf_repos"]
    if not models and not by_name:
        return [ModelFiles(*model_files({"model": None, "mmproj": mmprojs[0] if mmprojs else None}))]
    if len(mmprojs) not in (0, len(models)):
        raise UsageError(
            f"{counted(len(models), 'model')} and {counted(len(mmprojs), 'image encoder')} were given; pass "
            "one --mmproj for each model, or none"
        )
    pairs = zip(models, mmprojs or [None] * len(models), strict=True)
    files = [ModelFiles(*model_files({**given, "model": m, "mmproj": p})) for m, p in pairs]
    return files + [ModelFiles(*fetched(name, given)) for name in by_name]


def _numbers(option: str, text: str, least: int) -> list[int]:
    out = []
    for part in listed(option, text):
        if not re.fullmatch(r"\d{1,9}", part) or int(part) < least:
            raise UsageError(f"{option} takes numbers from {least}, not '{part}'")
        out.append(int(part))
    return out


def _shapes(chosen: dict[str, Any], image_size: str) -> list[Shape]:
    from kvedge_lab.bench.matrix import Shape

    width, height = options.pixels(image_size, 10**4)
    tokens, images = _numbers("--tokens", chosen["tokens"], 2), _numbers("--images", chosen["images"], 0)
    return [Shape(n, i, width, height) for n in tokens for i in images]


def _variants(given: dict[str, Any], budgets: str) -> list[Variant]:
    from kvedge_lab.bench.matrix import Variant
    from pykvedge.runtime.settings import Keep

    names = listed("--method", given["methods"])
    names = method_names() if names == ["all"] else ["full", *(name for name in names if name != "full")]
    types = listed("--kv-type", given["kv_types"])
    for name in types:
        KvType.parse(name)
    less: list[dict[str, str]] = [{}]
    if given["image_tokens"] is not None:
        amounts = listed("--image-tokens", given["image_tokens"])
        less += [{"pruner": given["pruner"], "image_tokens": amount} for amount in amounts]
    combined = itertools.product(types, names, less)
    kept = [None, *filter(None, [Keep.of(**options.keep(given))])]
    return [
        Variant(name, make_plan(name, budget, **fewer), kv_type, keep)
        for kv_type, name, fewer in combined
        for budget in ([None] if name == "full" else listed("--budget", budgets))
        for keep in (kept[:1] if name == "full" else kept)
    ]
