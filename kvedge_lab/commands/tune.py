"""The commands `kvedge tune` and `kvedge report`: a plan for one model, and its evidence."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvedge_lab.commands import common
from pykvedge.cli import options, paths
from pykvedge.cli.command import Number, command, option
from pykvedge.cli.modelfiles import model_files
from pykvedge.cli.options import listed
from pykvedge.errors import KvedgeError, UsageError
from pykvedge.plans.making import default_plan
from pykvedge.plans.making import plan as make_plan
from pykvedge.system.files import DATA

if TYPE_CHECKING:
    from kvedge_lab.eval.measure import Cell
    from kvedge_lab.tune.material import Material
    from kvedge_lab.tune.race import Race, RaceRecords

METHODS, BUDGETS = "kvedge,calibrated,snapkv,mixkv,kvzip", "0.5,0.3,0.2,0.1,0.05"
_ABOUT = ("show", "list_all", "remove")


@command()
@options.taking(
    options.MODEL,
    options.MMPROJ,
    *options.HUB,
    option("--images", group="Samples", common=True, type=common.PATH, metavar="FOLDER",
           help="A folder with 24 or more pictures. Default: drawn scenes for the packaged model, drawn pages for "
                "other models."),
    option("--questions", group="Samples", common=True, type=common.PATH, metavar="FILE",
           help="A file with one question per line. Default: general questions."),
    option("--minutes", group="Measurement", common=True, type=Number(0.1, 60 * 24 * 7), default=20,
           show_default=True, metavar="N", help="The largest total time in minutes."),
    option("--target", group="Measurement", common=True, type=Number(0.5, 1, max_open=True), default=0.99,
           show_default=True, metavar="SHARE",
           help="The share of tokens on which the plan and the full cache must agree."),
    option("--method", "--methods", "methods", group="What is kept", common=True, default=METHODS, show_default=True,
           metavar="A,B", help="Methods to measure (`kvedge methods` lists them). The default plan is always "
           "measured."),
    option("--budget", "--budgets", "budgets", group="What is kept", common=True, default=BUDGETS, show_default=True,
           metavar="A,B", help="Budgets to measure: shares of the prompt (0.2), or numbers of KV pairs (128)."),
    option("--seed", group="Samples", type=common.SEED, default=0, show_default=True, metavar="N",
           help="The seed of drawn pictures, or of the order of your pictures."),
    option("--fresh", group="Measurement", common=True, is_flag=True,
           help="Start again, and ignore the measurements of an earlier run."),
    option("--show", group="Certificate", common=True, is_flag=True,
           help="Show the certificate of the model, without a measurement."),
    option("--list", "list_all", group="Certificate", common=True, is_flag=True, help="Show which models are tuned."),
    option("--remove", group="Certificate", common=True, is_flag=True,
           help="Remove the certificate. kvedge then uses the default plan for the model."),
    option("--html", group="Certificate", common=True, type=common.PATH, metavar="FILE",
           help="Also write an HTML page with the plot and all figures."),
    options.CTX,
    options.THREADS,
    *options.DEVICES,
    options.KV_TYPE,
    options.KV_ROTATE,
    options.PARENT,
    options.JSON,
    options.QUIET,
    options.VERBOSE,
)  # fmt: skip
def tune(**given: Any) -> None:
    """Find the plan that fits your model, and prove it by measurement.

    The model answers questions about pictures with its full cache. Plans are measured against these answers, so nobody
    needs to label anything. The measures: the share of tokens that the plan agrees with, the share of equal answers,
    and the distance of the distributions, with the question in the prompt and with a later question.
    Half of the pictures choose, the others prove. The plan of the fewest bytes whose interval reaches --target is
    stored by the model's hash. chat, serve, attach and Session then use this plan if nobody names a method.
    To continue a stopped run, give the same command again.

    \b
    Examples:
      kvedge tune                                        the packaged model
      kvedge tune -m m.gguf --images holiday --questions mine.txt
      kvedge tune -hf user/repo:Q4_K_M --minutes 60 --target 0.995
      kvedge tune -m m.gguf --show --html m.html
      kvedge tune --list

    Exit code: 0 if a plan is stored, 1 if nothing can be promised, 130 after Ctrl-C.
    """
    if sum(bool(given[name]) for name in _ABOUT) > 1:
        raise UsageError("--show, --list and --remove exclude each other; give one of them")
    if given["html"] is not None and not paths.ask(Path.is_dir, given["html"].parent):
        raise UsageError(f"--html {given['html']} cannot be written: the folder {given['html'].parent} does not exist")
    common.check_file("--html", given["html"])
    if given["list_all"]:
        _list(given)
    elif given["show"] or given["remove"]:
        _stored(given)
    else:
        sys.exit(_run(given))


@command()
@click.argument("files", nargs=-1, type=common.PATH, metavar="[FILE.json]...")
@options.JSON
def report(files: tuple[Path, ...], as_json: bool) -> None:
    """Join certificates of `kvedge tune` into a table of models: Markdown, or all of them with --json.

    FILE.json: certificates, for example of other people. Default: yours.

    \b
    Examples:
      kvedge report
      kvedge report certificates/*.json > models.md
    """
    from kvedge_lab.tune import certificate
    from pykvedge.models import tuned

    found = [tuned.load(path).says for path in files or tuned.all_files()]
    if not found:
        raise UsageError("no model is tuned yet; run `kvedge tune`")
    try:
        click.echo(json.dumps(found) if as_json else certificate.models(found))
    except (KeyError, TypeError) as error:
        raise UsageError(f"a certificate is incomplete: {error} is missing or damaged; remove its file") from None


def _list(given: dict[str, Any]) -> None:
    from pykvedge.models import tuned

    found = [tuned.load(path) for path in tuned.all_files()]
    if given["as_json"]:
        click.echo(json.dumps([{"file": str(one.path), **one.says} for one in found]))
        return
    for one in found:
        click.echo(f"{one.says['model']['name']}: {one.line()}")
    if not found:
        click.echo("kvedge: no model is tuned", err=True)


def _stored(given: dict[str, Any]) -> None:
    from pykvedge.models import profiles, tuned

    model, _ = model_files(given)
    path = tuned.place(profiles.hash_of(model))
    if not path.is_file():
        raise KvedgeError(f"{model.name} is not tuned; run `kvedge tune`")
    if given["remove"]:
        path.unlink()
        click.echo(f"removed {path}", err=True)
        return
    _print(dict(tuned.load(path).says), path, given)


def _print(says: dict[str, Any], path: Path, given: dict[str, Any]) -> None:
    from kvedge_lab.tune import certificate

    if given["html"] is not None:
        certificate.write(given["html"], certificate.page(says))
    if given["as_json"]:
        click.echo(json.dumps({"file": str(path), **says}))
        return
    click.echo(f"{certificate.summary(says)}\n\n{certificate.table(says)}\n\n{path}")


def _run(given: dict[str, Any]) -> int:
    from kvedge_lab.tune import certificate

    with _race(given, _cells(given), 60 * given["minutes"]) as (race, kept_in):
        said = certificate.verdict(race)
        if said.taken is None or said.proof is None:
            click.echo(f"kvedge: no plan was stored, because no plan was proven: {said.why}", err=True)
            if race.profile is not None and race.problem():  # the profile comes from the same answers
                race.profile.unlink(missing_ok=True)
            return 1
        says = certificate.made(race, said.taken, said.proof, said.why, _command(given))
        path = certificate.save(says)
        for file in kept_in:
            file.unlink(missing_ok=True)
    if said.why:
        click.echo(f"kvedge: {said.why}", err=True)
    _print(says, path, given)
    return 0


def _command(given: dict[str, Any]) -> str:
    named = {"minutes": given["minutes"], "target": given["target"], "method": given["methods"],
             "budget": given["budgets"], "seed": given["seed"]}  # fmt: skip
    return "kvedge tune " + " ".join(f"--{name} {value}" for name, value in named.items())


def _cells(given: dict[str, Any]) -> list[Cell]:
    from kvedge_lab.eval.measure import Cell

    usual = default_plan()
    named = [make_plan(name, budget) for name in listed("--method", given["methods"]) if name != "full"
             for budget in listed("--budget", given["budgets"])]  # fmt: skip
    plans = {(one.method, str(one.budget.value)): one for one in (usual, *named)}
    return [Cell(one.method, one) for one in plans.values()]


def _names(cells: list[Cell], what: str) -> str:
    return ",".join(dict.fromkeys(str(getattr(cell.plan, what)) for cell in cells))


def _material(given: dict[str, Any], model: Path, folder: Path, questions: list[str]) -> Material:
    from kvedge_lab.tune import material
    from kvedge_lab.tune.certificate import LEAST_PROOF

    if given["images"] is not None:
        return material.folder(given["images"], given["seed"], questions, 2 * LEAST_PROOF)
    if model == DATA / "demo-model.gguf":
        return material.scenes(given["seed"], questions)
    return material.drawn_pages(given["seed"], questions, folder)


@contextlib.contextmanager
def _race(given: dict[str, Any], cells: list[Cell], seconds: float) -> Iterator[tuple[Race, list[Path]]]:
    """Runs a race, and yields it with the files of the unfinished run. Delete the files after the result is stored."""
    import tempfile

    from kvedge_lab.progress import Minutes
    from kvedge_lab.tune.budgets import calibrate
    from kvedge_lab.tune.material import hashed, read_questions
    from kvedge_lab.tune.race import Race
    from pykvedge.models import profiles, tuned
    from pykvedge.runtime.interrupt import CancelledError, as_event
    from pykvedge.runtime.loaded import borrow
    from pykvedge.runtime.settings import Settings
    from pykvedge.system import parent

    model, mmproj = model_files(given)
    if mmproj is None:
        raise UsageError("kvedge tune needs the image encoder of the model: pass --mmproj FILE.gguf")
    settings = Settings.of({**options.running(given), "verbose": given["verbose"]})
    model_hash = profiles.hash_of(model)
    place = tuned.place(model_hash)
    kept_in = [place.with_name(f"{place.stem}.{what}.jsonl") for what in ("run", "curves")]
    with contextlib.ExitStack() as held:
        pages = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kvedge-tune-")))
        questions = read_questions(given["questions"]) if given["questions"] else []
        material = _material(given, model, pages, questions)
        header = {"model": model_hash, "mmproj": profiles.hash_of(mmproj), "kv_type": settings.storage.key,
                  "pictures": material.source, "questions": hashed(questions), "target": given["target"],
                  "methods": _names(cells, "method"), "budgets": _names(cells, "budget"),
                  "plans": [cell.digest for cell in cells]}  # fmt: skip
        kept = _kept(held, kept_in, header, given["fresh"])
        display = Minutes(not given["quiet"] and not given["verbose"], seconds, kept.spent)
        held.callback(display.done)

        def say(line: str) -> None:
            if not given["quiet"]:
                display.say(f"kvedge: {line}")

        for line in (*material.notes, *([f"continuing after {kept.spent():.0f} s"] if kept.rows else [])):
            say(line)
        with as_event(threading.Event()) as cancel, parent.watched(given["parent_pid"] or 0, cancel):
            loan = borrow(model, mmproj, settings, display, cancel)
            held.callback(loan.give_back)
            race = Race(loan, settings, material, cells, cells[0], given["target"], seconds, kept, display, cancel)
            try:
                race.run(lambda reader: calibrate(race, reader, kept_in[1], say))
            except UsageError as error:  # a record of the unfinished run does not fit
                raise UsageError(str(error).replace("give --save another file", "add --fresh to start again")) from None
            except CancelledError:
                click.echo("kvedge: stopped; the same command continues the run", err=True)
                raise
        display.done()
        yield race, kept_in


def _kept(held: contextlib.ExitStack, files: list[Path], header: dict[str, Any], fresh: bool) -> RaceRecords:
    """Opens the figures of an unfinished run, or new ones. A lock keeps other programs out."""
    from kvedge_lab.tune.race import RaceRecords
    from pykvedge.errors import SaveError, SessionFileError
    from pykvedge.runtime.sessionlock import SessionLock

    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        held.enter_context(SessionLock(files[0]))
        for file in files if fresh else ():
            file.unlink(missing_ok=True)
        kept = RaceRecords(files[0], header)
        held.callback(kept.close)
        return kept
    except SessionFileError as error:
        raise SaveError(str(error).replace(", or use another session file", "")) from None
    except OSError as error:
        raise SaveError(f"{files[0].parent} cannot be written: {error.strerror or error}") from None
    except UsageError as error:
        why = str(error).replace("; save to another file", "")
        raise UsageError(f"{why}; add --fresh to start again, or run the same command to continue") from None
