"""kvedge eval."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvedge.cli.chat import model_files, plugin_option, positive, read_plan
from pykvedge.errors import KvedgeError, UsageError, unknown
from pykvedge.plans.plugin_files import load_file, source_digest
from pykvedge.plans.presets import methods as method_names
from pykvedge.plans.presets import plan as make_plan

if TYPE_CHECKING:
    from pykvedge.lab.eval.measure import Cell, Wants
    from pykvedge.lab.eval.runner import Job
    from pykvedge.lab.eval.tasks import Sample
    from pykvedge.plans.plan import Plan

FIVE = ("lookm", "mixkv", "elastic", "flashcache", "prefixkv")
METRICS = {"score": "answers", "rouge": "answers", "ppl": "likelihood", "kld": "likelihood", "top1": "likelihood"}
OUTPUTS = ("md", "csv", "json")
_PATH = click.Path(path_type=Path)


@click.command(name="eval")
@click.argument("data", nargs=-1, type=_PATH, metavar="[DATA]...")
@click.option("--model", type=_PATH, metavar="FILE.gguf", help="Default: the packaged demo model.")
@click.option("--mmproj", type=_PATH, metavar="FILE.gguf", help="The image encoder that belongs to the model.")
@click.option(
    "--tasks",
    metavar="A,B",
    help="Of the demo generator, or all; NAME/2 asks in the second turn. "
    "Default: all of the first turn, where no DATA is given.",
)
@click.option("--samples", type=int, default=20, show_default=True, metavar="N", help="Of each demo task.")
@click.option("--images", type=int, default=4, show_default=True, metavar="N", help="In demo tasks with several.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the demo samples.")
@click.option(
    "--format",
    "form",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Of DATA: jsonl, milebench, llava-description or mm-vet.",
)
@click.option("--image-folder", type=_PATH, metavar="PATH", help="Where the image paths of DATA start.")
@click.option("--limit", type=int, metavar="N", help="First samples of each data set.")
@click.option(
    "--methods",
    default=",".join(FIVE),
    show_default=True,
    metavar="A,B",
    help="See `kvedge methods`, or all. The full cache is always measured.",
)
@click.option(
    "--budgets",
    default="0.2",
    show_default=True,
    metavar="A,B",
    help="0.2 of the prompt, or 128 KV pairs per layer and head.",
)
@click.option(
    "--plan",
    "plans",
    type=_PATH,
    multiple=True,
    metavar="FILE.json",
    help="A composition of your own, with its budget; repeatable. Named after the file.",
)
@plugin_option
@click.option(
    "--against",
    default="full",
    show_default=True,
    metavar="METHOD",
    help="What changes and their intervals are against: the full cache, or one of --methods at the same budget.",
)
@click.option(
    "--metrics",
    default=",".join(METRICS),
    show_default=True,
    metavar="A,B",
    help="score and rouge generate answers; ppl, kld and top1 look at the reference answer.",
)
@click.option("--max-tokens", type=int, default=512, show_default=True, metavar="N", help="Longest answer.")
@click.option("--save", type=_PATH, metavar="FILE.jsonl", help="Keep every result, one line each, as it is measured.")
@click.option("--resume", is_flag=True, help="Go on with the results in --save FILE; nothing is measured twice.")
@click.option("--output", "-o", type=click.Choice(OUTPUTS), default="md", show_default=True, help="Form of the table.")
@click.option(
    "--plot",
    type=_PATH,
    metavar="FILE",
    help="Right answers and KL divergence against the bytes kept, a line a method: .png, .svg, .pdf; needs matplotlib.",
)
@click.option("--ctx", type=int, metavar="N", help="Tokens that a conversation may have. Default: the model's.")
@click.option("--threads", type=int, metavar="N", help="Default: one per physical core.")
@click.option("--gpu-layers", type=int, metavar="N", help="Layers on the GPU, -1 for all.")
@click.option("--kv-type", default="f16", show_default=True, metavar="TYPE", help="Storage type of keys and values.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--verbose", is_flag=True, help="llama.cpp's log on stderr.")  # fmt: skip
def evaluate(data: tuple[Path, ...], **given: Any) -> None:
    """Measure what compression costs: every method on the same samples, against the full cache.

    DATA: files of samples (our JSONL, LLaVA-Description, MM-Vet) or folders (MileBench). Without DATA, scenes that
    the demo model knows. The table says for each method how many answers are right, how perplexity and the
    distribution of the next token change, and how sure that is.

    \b
    Examples:
      kvedge eval                                   the five papers' methods on the demo model
      kvedge eval --methods all --budgets 0.5,0.2,0.1,0.05 --tasks code,where/2 --save r.jsonl
      kvedge eval --save r.jsonl --resume ...       goes on after a break
      kvedge eval --methods all --budgets 0.5,0.2,0.1,0.05 --plot cost.png
      kvedge eval --model m.gguf --mmproj mm.gguf MileBench/TQA -o csv > table.csv
      kvedge eval --model m.gguf --mmproj mm.gguf own.jsonl --plan mine.json --metrics ppl,kld
      kvedge eval --plugin mine.py --methods snapkv,mine --budgets 0.2,0.1
      kvedge eval --methods mixkv,snapkv --against snapkv --budgets 0.2,0.1,0.05

    Exit code: 0, or 1 if something was left out (stderr says what), or 130 after Ctrl-C; both print the table.
    """
    given = {**given, "data": data}
    sys.exit(_run(given))


def _run(given: dict[str, Any]) -> int:
    from pykvedge.cli.display import Display
    from pykvedge.lab import drawing
    from pykvedge.lab.eval.records import Records
    from pykvedge.lab.eval.runner import Outcome, evaluate, steps
    from pykvedge.lab.jsonlines import SaveError
    from pykvedge.lab.progress import Countdown
    from pykvedge.runtime.interrupt import as_event

    for file in given["plugins"]:
        load_file(file)
    if given["plot"] is not None:
        drawing.check("--plot", given["plot"])
    job = _job(given)
    _check_base(job.cells, given["against"])
    if given["resume"] and given["save"] is None:
        raise UsageError("--resume needs the file of results: --save FILE")
    loud = not given["quiet"] and not given["verbose"]
    display = Display(enabled=loud)
    records = Records(given["save"], job.header(), given["resume"])
    outcome = Outcome(records)
    countdown = Countdown(steps(job, records), enabled=loud)
    failure: KvedgeError | None = None
    try:
        with as_event(threading.Event()) as cancel:
            outcome = evaluate(job, records, _until_loaded(display), countdown, cancel)
    except SaveError as error:
        failure = error
    finally:
        display.done()
        countdown.clear()
        records.close()
    _print(job, outcome, given)
    if failure is not None:
        raise failure
    return 130 if outcome.interrupted else 1 if outcome.left_out else 0


def _until_loaded(display: Any) -> Any:
    def progress(what: str, share: float) -> None:
        if share < 1.0:
            display(what, share)
        else:
            display.done()

    return progress


def _job(given: dict[str, Any]) -> Job:
    from pykvedge.lab.eval.runner import Job
    from pykvedge.runtime.settings import Settings

    model, mmproj = model_files(given["model"], given["mmproj"])
    for path in filter(None, (model, mmproj)):
        if not path.is_file():
            raise UsageError(f"{path} does not exist" if not path.exists() else f"{path} is a folder, not a model")
    settings = {k: given[k] for k in ("gpu_layers", "kv_type", "verbose")}
    settings.update(n_ctx=positive("--ctx", given["ctx"]), threads=positive("--threads", given["threads"]))
    samples, cells, wants = _samples(given), _cells(given), _wants(given)
    return Job(model, mmproj, samples, cells, wants, Settings.of(settings))


def _listed(option: str, text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError(f"{option} is empty; name at least one")
    return names


def _samples(given: dict[str, Any]) -> list[Sample]:
    from pykvedge.lab.eval.datasets import load
    from pykvedge.lab.eval.tasks import SECOND, demo_names, demo_samples

    positive("--samples", given["samples"])
    limit = positive("--limit", given["limit"]) or None
    if given["seed"] < 0:
        raise UsageError(f"--seed must be 0 or more, not {given['seed']}")
    out: list[Sample] = []
    for path in given["data"]:
        out += load(path.expanduser(), given["form"], given["image_folder"], limit)
    tasks = _listed("--tasks", given["tasks"]) if given["tasks"] is not None else []
    if not tasks and not out:
        tasks = [name for name in demo_names() if not name.endswith(SECOND)]
    if tasks == ["all"]:
        tasks = demo_names()
    for name in tasks:
        out += demo_samples(name, given["samples"], given["seed"], given["images"])
    twice = [name for name, n in Counter(sample.id for sample in out).items() if n > 1]
    if twice:
        raise UsageError(f"there are two samples {twice[0]}; rename one, or one of the files")
    return out


def _cells(given: dict[str, Any]) -> list[Cell]:
    from pykvedge.lab.eval.runner import FULL, full_cell

    names = _listed("--methods", given["methods"])
    if names == ["all"]:
        names = method_names()
    budgets = _listed("--budgets", given["budgets"])
    cells = [full_cell()]
    for name in names:
        if name != FULL:
            cells += [_cell(name, make_plan(name, budget)) for budget in budgets]
    for path in given["plans"]:
        cells.append(_cell(path.stem, read_plan(path)))
    keys = [cell.key for cell in cells]
    for cell in cells:
        if keys.count(cell.key) > 1:
            raise UsageError(f"{cell.name} at {cell.plan.budget} was asked for twice; rename the plan's file")
    return cells


def _cell(name: str, plan: Plan) -> Cell:
    from pykvedge.lab.eval.measure import Cell

    return Cell(name, plan, source_digest(plan))


def _wants(given: dict[str, Any]) -> Wants:
    from pykvedge.lab.eval.measure import Wants

    longest = positive("--max-tokens", given["max_tokens"])
    names = _listed("--metrics", given["metrics"])
    for name in names:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    kinds = {METRICS[name] for name in names}
    return Wants("answers" in kinds, "likelihood" in kinds, longest)


def _check_base(cells: list[Cell], against: str) -> None:
    """What is compared with must be measured, and at every budget that the others have."""
    from pykvedge.lab.eval.runner import FULL

    if against == FULL:
        return
    budgets = {cell.key[1] for cell in cells if cell.name == against}
    if not budgets:
        raise UsageError(f"--against {against}: it is not measured; add it to --methods")
    for cell in cells:
        if cell.name != FULL and cell.key[1] not in budgets:
            raise UsageError(f"--against {against}: it is not measured at {cell.budget}, as {cell.name} is")


def _print(job: Job, outcome: Any, given: dict[str, Any]) -> None:
    from pykvedge.lab.eval import plot, table
    from pykvedge.lab.eval.runner import FULL

    form, against = given["output"], given["against"]
    cells = [cell for cell in job.cells if any(key[1:] == cell.key for key in outcome.records.rows)]
    made = table.lines(outcome.records.rows, job.samples, cells, against)
    if form == "json":
        about = {**job.header(), "against": against, "left_out": outcome.left_out, "interrupted": outcome.interrupted}
        click.echo(table.as_json(made, about))
    elif form == "csv":
        click.echo(table.as_csv(made))
    elif made:
        notes = ["Stopped before the end."] if outcome.interrupted else []
        if outcome.left_out:
            notes.append(f"Left out: {len(outcome.left_out)}, see the messages.")
        click.echo(table.as_markdown(made, notes, against))
    if given["plot"] is not None and not plot.draw(given["plot"], made, against == FULL):
        click.echo("kvedge: too little was measured for a picture", err=True)
