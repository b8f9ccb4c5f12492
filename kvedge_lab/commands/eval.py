"""The command `kvedge eval` measures what compression costs."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvedge_lab.commands import common
from kvedge_lab.progress import Steps
from pykvedge.cli import options, paths
from pykvedge.cli.command import command, option
from pykvedge.cli.modelfiles import model_files
from pykvedge.cli.options import Whole, listed, read_plan
from pykvedge.cli.progress import Fetching
from pykvedge.cli.tables import folded
from pykvedge.errors import ProfileError, UsageError, unknown
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.plugin_files import source_digest
from pykvedge.plans.presets import methods as method_names
from pykvedge.system.files import require_file
from pykvedge.system.memory import readable

if TYPE_CHECKING:
    from kvedge_lab.eval.measure import Cell, MeasureOptions
    from kvedge_lab.eval.runner import Job
    from kvedge_lab.eval.tasks import Sample
    from pykvedge.plans.plan import Plan

METRICS = {"score": "answers", "rouge": "answers", "ppl": "likelihood", "kld": "likelihood", "top1": "likelihood"}
OUTPUTS = ("md", "csv", "json")
BUDGET = "0.2"


@command(name="eval")
@click.argument("data", nargs=-1, type=common.PATH, metavar="[DATA]...")
@options.taking(
    options.MODEL,
    options.MMPROJ,
    *options.HUB,
    option("--tasks", group="Samples", common=True, metavar="A,B",
           help="Tasks of the demo generator, or all. NAME/2 asks in the second turn. NAME+NAME asks several "
                "questions about the same scene. page-NAME asks about --images drawn pages; pages: all page tasks. "
                "Default without DATA: all demo tasks of the first turn."),
    option("--samples", group="Samples", common=True, type=common.COUNT, default=20, show_default=True, metavar="N",
           help="The number of samples of each demo task."),
    option("--images", group="Samples", type=Whole(1, 8), default=4, show_default=True, metavar="N",
           help="The number of pages, or of scenes in demo tasks with several scenes."),
    option("--seed", group="Samples", type=common.SEED, default=0, show_default=True, help="The seed of the demo "
    "samples."),
    option("--format", "form", group="Samples", common=True, default="auto", show_default=True, metavar="NAME",
           help="The format of DATA: jsonl, milebench, llava-description, mm-vet, docvqa, textvqa, chartqa, ocrbench, "
                "textcaps, mm-niah, screenspot, screenspot-1000 or screenspot-pixels."),
    option("--image-folder", group="Samples", type=common.PATH, metavar="PATH",
           help="The folder to which image paths in DATA are relative."),
    option("--recipe", group="Measurement", metavar="NAME",
           help="Repeat a table of a paper on DATA, with its methods and budgets, and compare the figures; 'list' "
                "lists the recipes."),
    option("--download", group="Samples", is_flag=True,
           help="Download the recipe's data, and its model if no model is named, into the cache. A later run "
                "continues a stopped download."),
    option("--manifest", group="Samples", type=common.PATH, metavar="FILE.json",
           help="A file with addresses and checksums for --download, instead of the packaged file."),
    option("--paper", group="Output", type=common.PATH, metavar="FILE",
           help="Also write a table of this run's and the paper's figures: .md, .tex or .csv."),
    option("--limit", group="Samples", common=True, type=Whole(), metavar="N", help="Use only the first N samples of "
    "each data set."),
    common.METHOD_LIST,
    common.budget_list(BUDGET),
    option("--plan", "plans", group="What is kept", type=common.PATH, multiple=True, metavar="FILE.json",
           help="A plan file with a budget; repeatable. The plan is named after its file."),
    options.PLUGIN,
    option("--compress", group="What is kept", type=click.Choice(["prompt", "context", "conversation"]),
           default="prompt", show_default=True,
           help="What to compress: prompt (each message with its question, as in chat), context (everything before "
                "the last question), or conversation (the whole conversation as one prompt)."),
    *options.KEEP,
    option("--against", group="Measurement", default="full", show_default=True, metavar="METHOD",
           help="The reference for changes and their intervals: full, or one of --method at the same budget."),
    option("--metrics", group="Measurement", common=True, default=",".join(METRICS), show_default=True, metavar="A,B",
           help="The metrics. score and rouge generate answers; ppl, kld and top1 use the reference answer."),
    option("--max-tokens", group="Measurement", type=Whole(), default=512, show_default=True, metavar="N",
           help="The largest number of tokens of an answer."),
    option("--save", group="Output", common=True, type=common.PATH, metavar="FILE.jsonl",
           help="Save each result in this file when it is measured, one per line."),
    option("--resume", group="Output", common=True, is_flag=True,
           help="Continue with the results in --save FILE. No result is measured twice."),
    common.output("Write the table to this file instead of stdout: .md, .csv or .json.", metavar="FILE"),
    options.JSON,
    option("--plot", group="Output", common=True, type=common.PATH, metavar="FILE",
           help="Plot right answers and KL divergence over the bytes kept, one line per method: .png, .svg, .pdf; "
                "needs matplotlib."),
    options.CTX,
    options.THREADS,
    *options.DEVICES,
    options.KV_TYPE,
    options.KV_ROTATE,
    options.QUIET,
    options.VERBOSE,
)  # fmt: skip
def evaluate(data: tuple[Path, ...], **given: Any) -> None:
    """Measure what compression costs, against the full cache.

    Every method answers the same samples.

    DATA: files of samples (our JSONL, LLaVA-Description, MM-Vet) or folders (MileBench). Without DATA, scenes that
    the demo model knows. The table says for each method how many answers are right, how perplexity and the
    distribution of the next token change, and how sure that is.

    \b
    Examples:
      kvedge eval                   the default methods on the packaged model
      kvedge eval --method all --budget 0.5,0.2 --tasks code --save r.jsonl
      kvedge eval --save r.jsonl --resume ...       continues a stopped run
      kvedge eval --method all --budget 0.5,0.2,0.1,0.05 --plot cost.png
      kvedge eval -m m.gguf MileBench/TQA --output table.csv
      kvedge eval -m m.gguf own.jsonl --plan mine.json --metrics ppl,kld
      kvedge eval --plugin mine.py --method snapkv,mine --budget 0.2,0.1
      kvedge eval --recipe mixkv-chartqa --download --limit 100 --paper t.tex
      kvedge eval --method mixkv,snapkv --against snapkv --budget 0.2,0.1,0.05

    Exit code: 0, or 1 if something was left out (stderr says what), or 130 after Ctrl-C; both print the table.
    """
    given = {**given, "data": data}
    sys.exit(_run(given))


def _run(given: dict[str, Any]) -> int:
    from kvedge_lab import drawing
    from kvedge_lab.eval.records import Records
    from kvedge_lab.eval.runner import Outcome, evaluate, steps
    from kvedge_lab.jsonlines import SaveError
    from pykvedge.runtime.interrupt import as_event

    if given["recipe"] == "list":
        return _list_recipes(given)
    if given["resume"] and given["save"] is None:
        raise UsageError("--resume needs the file of results: add --save FILE")
    given = _going_on(given) if given["resume"] else given
    given = _downloaded(given)
    asked = {name: given[name] for name in _ASKED}
    if given["recipe"] is not None:
        given = _by_recipe(given)
    options.load_plugins(given)
    common.check_table(given["output"], OUTPUTS)
    if given["plot"] is not None:
        drawing.check("--plot", given["plot"])
    job = _job(given)
    _check_base(job.cells, given["against"])
    loud = not given["quiet"] and not given["verbose"]
    records = Records(
        given["save"], job.header() | {"asked": json.loads(json.dumps(asked, default=str))}, given["resume"]
    )
    outcome = Outcome(records)
    display = Steps(enabled=loud, steps=steps(job, records))
    try:
        with closing(records), as_event(threading.Event()) as cancel:
            outcome = evaluate(job, records, display, cancel)
    except SaveError:
        _print(job, outcome, given)
        raise
    _print(job, outcome, given)
    return 130 if outcome.interrupted else 1 if outcome.left_out else 0


# the options that a resumed run takes over
_ASKED = ("data", "tasks", "samples", "images", "seed", "form", "image_folder", "recipe", "limit", "methods", "budgets",
          "plans", "plugins", "compress", "metrics", "max_tokens")  # fmt: skip
_PATHS = ("data", "image_folder", "plans", "plugins")


def _going_on(given: dict[str, Any]) -> dict[str, Any]:
    """Replaces omitted options by the options of the run that began the file."""
    from kvedge_lab.eval.records import asked_before

    context, before = click.get_current_context(), asked_before(given["save"])
    typed = {name for name in _ASKED if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if typed & {"data", "tasks"}:  # other samples
        typed |= {"data", "tasks", "recipe"}
    if typed & {"methods", "plans"}:
        typed |= {"methods", "plans", "recipe"}
    found = {name: before[name] for name in _ASKED if name in before and name not in typed}
    for name in _PATHS:
        if found.get(name):
            one = name == "image_folder"
            found[name] = paths.expanded(found[name]) if one else tuple(map(paths.expanded, found[name]))
    return {**given, **found}


def _job(given: dict[str, Any]) -> Job:
    from kvedge_lab.eval.runner import Job
    from pykvedge.runtime.settings import Settings

    model, mmproj = model_files(given)
    for path in filter(None, (model, mmproj)):
        try:
            require_file(path)
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    settings = {**options.running(given), **_keep(given), "verbose": given["verbose"]}
    samples, cells, measures = _samples(given), _cells(given, model), _measures(given)
    return Job(model, mmproj, samples, cells, measures, Settings.of(settings))


def _keep(given: dict[str, Any]) -> dict[str, Any]:
    found = options.keep(given)
    if found and given["compress"] == "conversation":
        raise UsageError(
            "--keep does not work with --compress conversation, which has no later messages; omit one of them"
        )
    return found


_OF_RECIPE = ("methods", "budgets", "metrics", "form", "max_tokens", "plans", "tasks", "compress", "against")


def _by_recipe(given: dict[str, Any]) -> dict[str, Any]:
    """Replaces options by those of a recipe. Raises UsageError if one of them is given too."""
    from kvedge_lab.eval.recipes import recipe

    chosen, context = recipe(given["recipe"]), click.get_current_context()
    for name in _OF_RECIPE:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            shown = {"methods": "method", "budgets": "budget", "form": "format", "plans": "plan"}.get(name, name)
            raise UsageError(f"--recipe excludes --{shown.replace('_', '-')}, which the recipe sets; omit one of them")
    if not given["data"]:
        raise UsageError(
            f"--recipe {given['recipe']} needs DATA, a file or folder of format {chosen.form}, or --download"
        )
    return {**given, "named": chosen.named(), "budgets": ",".join(chosen.budgets), "metrics": chosen.metrics,
            "form": chosen.form, "max_tokens": chosen.max_tokens}  # fmt: skip


_PAPER = ("md", "tex", "csv")


def _downloaded(given: dict[str, Any]) -> dict[str, Any]:
    """Downloads the recipe's data, and replaces DATA and, if no model is named, the model."""
    from kvedge_lab.eval import downloads
    from kvedge_lab.eval.recipes import recipe

    name, paper = given["recipe"], given["paper"]
    if name is None and (given["download"] or given["manifest"] or paper):
        raise UsageError("--download, --manifest and --paper need a recipe: add --recipe NAME")
    if paper is not None and paper.suffix[1:] not in _PAPER:
        raise UsageError(f"--paper {paper} must end in .md, .tex or .csv")
    common.check_file("--paper", paper)
    if not given["download"]:
        return given
    if given["data"]:
        raise UsageError("--download and DATA exclude each other; omit one of them")
    recipe(name)
    entry = downloads.read_manifest(given["manifest"] or downloads.MANIFEST, name)
    with Fetching(enabled=not given["quiet"]) as display:

        def look(file: str, there: int, size: int) -> None:
            whole = f" of {readable(size)}" if size else ""
            display(f"downloading {file}: {readable(there)}{whole}", there / size if size else 0)

        found = downloads.fetch(entry, downloads.folder_of(name, entry), look)
    named = given["model"] is not None or given["hf_repo"] is not None
    return {**given, "data": (found.data,), "image_folder": given["image_folder"] or found.images,
            "hf_repo": given["hf_repo"] if named else found.model}  # fmt: skip


def _list_recipes(given: dict[str, Any]) -> int:
    from kvedge_lab.eval.recipes import RECIPES

    if given["as_json"]:
        rows = {n: {"table": r.table, "form": r.form, "budgets": list(r.budgets), "metrics": r.metrics,
                    "methods": [one[0] for one in r.named()]} for n, r in RECIPES.items()}  # fmt: skip
        click.echo(json.dumps(rows, indent=1))
        return 0
    head = ["recipe", "of", "data", "budgets"]
    click.echo(folded([head, *([n, r.table, r.form, ", ".join(r.budgets)] for n, r in RECIPES.items())]))
    return 0


def _samples(given: dict[str, Any]) -> list[Sample]:
    from kvedge_lab.eval.datasets import load
    from kvedge_lab.eval.tasks import PAGES, SECOND, demo_names, demo_samples, page_names, page_samples

    out: list[Sample] = []
    for path in given["data"]:
        out += load(path, given["form"], given["image_folder"], given["limit"])
    tasks = listed("--tasks", given["tasks"]) if given["tasks"] is not None else []
    if not tasks and not out:
        tasks = [name for name in demo_names() if not name.endswith(SECOND)]
    if tasks == ["all"]:
        tasks = demo_names()
    if "pages" in tasks:
        at = tasks.index("pages")
        tasks[at : at + 1] = [name for name in page_names() if not name.endswith(SECOND)]
    loud = not given["quiet"] and not given["verbose"]
    with Steps(enabled=loud, steps=len(tasks) * given["samples"]) as display:
        for name in tasks:
            draw = page_samples if name.startswith(PAGES) else demo_samples
            look = partial(display.step, f"drawing samples of {name}")
            out += draw(name, given["samples"], given["seed"], given["images"], look=look)
    twice = [name for name, n in Counter(sample.id for sample in out).items() if n > 1]
    if twice:
        raise UsageError(f"two samples have the same id {twice[0]}; rename one sample or one file")
    return out


def _cells(given: dict[str, Any], model: Path) -> list[Cell]:
    from kvedge_lab.eval.runner import FULL, full_cell

    names = listed("--method", given["methods"]) if "named" not in given else []
    if names == ["all"]:
        names = method_names()
    budgets = listed("--budget", given["budgets"] or BUDGET)
    cells = [full_cell()]
    for name in names:
        if name != FULL:
            cells += [_cell(name, make_plan(name, budget), model) for budget in budgets]
    for name, method, settings in given.get("named", ()):
        cells += [_cell(name, make_plan(method, budget, **settings), model) for budget in budgets]
    for path in given["plans"]:
        if path.stem == FULL:
            raise UsageError(f"{path}: the name 'full' is reserved for the full cache; rename the plan's file")
        cells.append(_cell(path.stem, read_plan(path), model))
    keys = [cell.key for cell in cells]
    for cell in cells:
        if keys.count(cell.key) > 1:
            raise UsageError(f"{cell.name} at {cell.plan.budget} was given twice; rename the plan's file")
    return cells


def _cell(name: str, plan: Plan, model: Path) -> Cell:
    from kvedge_lab.eval.measure import Cell
    from pykvedge.models import tuned

    try:
        profiles = tuned.digests(plan, model)
    except ProfileError:  # the error is reported when the method is measured
        profiles = {}
    return Cell(name, plan, "".join([source_digest(plan), *profiles.values()]))


def _measures(given: dict[str, Any]) -> MeasureOptions:
    from kvedge_lab.eval.measure import MeasureOptions

    names = listed("--metrics", given["metrics"])
    for name in names:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    kinds = {METRICS[name] for name in names}
    return MeasureOptions("answers" in kinds, "likelihood" in kinds, given["max_tokens"], given["compress"])


def _check_base(cells: list[Cell], against: str) -> None:
    """Raises UsageError unless --against is measured, at every budget of the other methods."""
    from kvedge_lab.eval.runner import FULL

    if against == FULL:
        return
    budgets = {cell.key[1] for cell in cells if cell.name == against}
    if not budgets:
        raise UsageError(f"--against {against} is not measured; add {against} to --method")
    for cell in cells:
        if cell.name != FULL and cell.key[1] not in budgets:
            raise UsageError(
                f"--against {against} is not measured at budget {cell.budget} of {cell.name}; measure "
                f"{against} at this budget too"
            )


def _print(job: Job, outcome: Any, given: dict[str, Any]) -> None:
    from kvedge_lab.eval import plot, recipes, table
    from kvedge_lab.eval.runner import FULL

    against = given["against"]
    cells = [cell for cell in job.cells if any(key[1:] == cell.key for key in outcome.records.rows)]
    made = table.lines(outcome.records.rows, job.samples, cells, against)
    recipe = given["recipe"]
    about = {**job.header(), "against": against, "left_out": outcome.left_out, "interrupted": outcome.interrupted}
    notes = ["Stopped before the end."] if outcome.interrupted else []
    if outcome.left_out:
        notes.append(f"Left out: {len(outcome.left_out)}; the messages on stderr give the reasons.")
    if recipe is not None:
        notes.append(recipes.beside(recipe, made))
        about["paper"] = recipes.as_rows(recipe, made)
        forms_of_paper = {"md": recipes.beside, "tex": recipes.as_latex, "csv": recipes.as_csv}
        if given["paper"] is not None:
            common.write_file("--paper", given["paper"], forms_of_paper[given["paper"].suffix[1:]](recipe, made))
    forms = {
        "md": lambda: table.as_markdown(made, notes, against) if made else "",
        "csv": lambda: common.as_csv(made, "_change"),
        "json": lambda: table.as_json(made, about),
    }
    common.write_table(given, forms)
    tasks = list(dict.fromkeys(sample.task for sample in job.samples))
    of = f"{job.model.stem}, {', '.join(tasks) if len(tasks) <= 4 else f'{len(tasks)} tasks'}"
    if given["plot"] is not None and not plot.draw(given["plot"], made, against == FULL, of):
        click.echo("kvedge: the plot was not written, because there are too few results", err=True)
