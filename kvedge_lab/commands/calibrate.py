"""The command `kvedge calibrate` measures profiles of a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kvedge_lab.commands import common
from pykvedge.cli import options
from pykvedge.cli.command import Command, option
from pykvedge.cli.modelfiles import model_files
from pykvedge.errors import UsageError, unknown
from pykvedge.plans.making import plan
from pykvedge.system.shown import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvedge_lab.calibrate.budgets import Curves, Setup
    from kvedge_lab.calibrate.samples import Labelled
    from kvedge_lab.progress import Steps
    from pykvedge.chat.session import Session
    from pykvedge.models.model import Model
    from pykvedge.plans.profile import Profile

KINDS = {"visual": "visual-heads", "retrieval": "retrieval-heads", "redundancy": "key-redundancy"}
MAX_QUESTIONS = 3  # number of different questions about every image of the scenes
SCORER = "mixkv"  # the scorer whose curves serve other scorers best
N_OUTPUTS = 64  # tokens of an answer in one pass; each needs a row of logits
_OPTIONS = (
    options.MODEL,
    options.MMPROJ,
    *options.HUB,
    option("--data", group="Samples", common=True, type=common.PATH, metavar="FILE.jsonl",
           help="Your own samples. Default: scenes drawn by kvedge."),
    common.output("Write the profile to this file. Default: a file that `kvedge chat` finds.", metavar="FILE.json"),
    options.CTX,
    options.THREADS,
    *options.DEVICES,
    options.JSON,
    options.QUIET,
)  # fmt: skip


def _most(default: int, text: str) -> Any:
    """Returns the option --samples; its default and text differ between commands."""
    return option("--samples", group="Samples", common=True, type=common.COUNT, default=default, show_default=True,
                  metavar="N", help=text)  # fmt: skip


@click.group()
def calibrate() -> None:
    """Measure a model once, for methods that work with a profile.

    Some methods use facts about the model that hold for every prompt: which heads look at the source of an answer
    (sparsemm, headkv, mixkv-sparsemm, mixkv-headkv), which layers need many tokens (prefixkv with --set
    allocator.source=profile), in which heads keys are alike (mixkv with --set scorer.source=profile), and what each
    head's share of the budget costs the answers (calibrated). A profile holds these numbers. It belongs to the weights
    in one GGUF file. Later commands find the profile by itself, and refuse it for any other model. If the command is
    stopped, nothing is written.
    """


@calibrate.command(cls=Command)
@options.taking(
    option("--kind", group="Measurement", common=True, default="visual", show_default=True, metavar="KIND",
           help="visual: for sparsemm; retrieval: for headkv; redundancy: for mixkv with scorer.source=profile."),
    _most(50, "The largest number of prompts to measure."),
    *_OPTIONS,
)  # fmt: skip
def heads(kind: str, samples: int, **given: Any) -> None:
    """Find the heads that attend to the source of an answer, or whose keys are alike.

    The model answers questions about images in which the place of the answer is known. While it generates a word that
    is in exactly one labelled box, heads that look into the box get a score: with visual (SparseMM) if their most
    attended token is in the box, with retrieval (HeadKV) by their attention to the box among their most attended
    tokens. With redundancy (MixKV) prompts are only read: the score is the similarity of the keys of each KV head,
    averaged over the prompts. It needs no boxes and answers.

    \b
    Your own samples (--data), one a line; a box is [left, top, right, bottom]:
      {"image": "shop.jpg", "question": "What is on the sign?",
       "answer": "Open", "boxes": [{"box": [40, 12, 180, 60], "text": "Open"}]}
      {"question": "The key is 4711. ... What is the key?", "needle": "4711",
       "answer": "4711"}

    \b
    Examples:
      kvedge calibrate heads
      kvedge calibrate heads --kind redundancy
      kvedge calibrate heads -m m.gguf --data signs.jsonl --samples 100
      kvedge chat -m m.gguf --image a.jpg --method sparsemm "What is this?"
    """
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    from kvedge_lab.calibrate.heads import key_redundancy, score_heads

    made: dict[str, Any] = {"command": f"kvedge calibrate heads --kind {kind} --samples {samples}"}
    with _session(given) as (session, display, cancel):
        source = _samples(given, KINDS[kind])
        if kind == "redundancy":
            values, used = key_redundancy(session, source, samples, display, cancel)
        else:
            found = score_heads(session, KINDS[kind], source, samples, display, cancel)
            values, used, made["labelled_tokens"] = found.values, found.samples, found.tokens
    _deliver(given, session.model, KINDS[kind], values, (), used, made)


@calibrate.command(cls=Command)
@options.taking(
    option("--budget", "budgets", group="Measurement", common=True, default="0.1,0.2,0.3,0.5,0.7", show_default=True,
           metavar="A,B", help="Budgets to search, as shares of the prompt. Results for other budgets are "
           "interpolated."),
    _most(10, "The largest number of prompts to search. Each prompt is read once per budget."),
    *_OPTIONS,
)  # fmt: skip
def prefix(budgets: str, samples: int, **given: Any) -> None:
    """Find how many tokens each layer keeps with PrefixKV.

    For each prompt and budget PrefixKV's search runs as it does online, and the share of the prompt that each layer
    keeps is averaged over the prompts. With the profile no search is needed, and a layer can be cut before the next
    one has run.

    \b
    Your own samples (--data), one a line:
      {"image": "street.jpg", "question": "Describe the image."}

    \b
    Examples:
      kvedge calibrate prefix
      kvedge calibrate prefix -m m.gguf --data prompts.jsonl --budget 0.1,0.2
      kvedge chat ... --method prefixkv --set allocator.source=profile "?"
    """
    shares = _shares("--budget", budgets)
    from kvedge_lab.calibrate.prefix import check_budgets, kept_shares

    check_budgets(shares)
    with _session(given) as (session, display, cancel):
        values, used = kept_shares(session, shares, _samples(given, "prefix"), samples, display, cancel)
    command = f"kvedge calibrate prefix --budget {','.join(f'{b:g}' for b in shares)} --samples {samples}"
    made = {"command": command, "method": "prefixkv"}
    _deliver(given, session.model, "prefix", values, tuple(shares), used, made)


@calibrate.command(cls=Command)
@options.taking(
    _most(24, "The largest number of prompts to measure."),
    option("--points", group="Measurement", common=True, type=int, default=12, show_default=True, metavar="N",
           help="The number of kept shares to measure for each head: a geometric series from 1/128 of the prompt to "
                "all of it."),
    option("--method", group="Measurement", default="snapkv", show_default=True, metavar="NAME",
           help="The method whose scorer and reducer are used for the measurement. Default: snapkv with scorer mixkv."),
    option("--scorer", group="Measurement", metavar="NAME",
           help="Use another scorer in the method. See `kvedge methods NAME`."),
    options.SET,
    option("--compress", group="Measurement", common=True, default="conversation", show_default=True, metavar="A,B",
           help="What to compress: conversation (everything with the question), context (everything before the "
                "question), or both, which takes twice as long."),
    option("--baseline", group="Measurement", type=float, default=0.05, show_default=True, metavar="SHARE",
           help="The share of the prompt that the other heads keep."),
    option("--targets", group="Measurement", default="0.05,0.1,0.2", show_default=True, metavar="A,B",
           help="Budgets, as shares of the prompt. The exchange minimises the average loss over these budgets."),
    option("--around", group="Measurement", common=True, type=common.PATH, metavar="PROFILE.json",
           help="Divide the baseline of the other heads by this profile. The result is the mean of the new and the "
                "old shares."),
    option("--seed", group="Samples", type=common.SEED, default=2024, show_default=True, metavar="N",
           help="The seed of the scenes drawn by kvedge."),
    option("--questions", group="Samples", type=int, default=1, show_default=True, metavar="N",
           help="The largest number of questions about each scene drawn by kvedge. Only the last answer is measured."),
    option("--save", group="Output", type=common.PATH, metavar="FILE.jsonl",
           help="Save the losses of each head in this file when they are measured, one line per head."),
    option("--resume", group="Output", is_flag=True,
           help="Continue with the losses in --save FILE. Other --targets need no new measurements."),
    *_OPTIONS,
)  # fmt: skip
def budgets(samples: int, points: int, method: str, scorer: str | None, seed: int, **given: Any) -> None:
    """Find the share of all KV pairs that each head keeps with allocator calibrated.

    For every head and share, a copy of the prompt is compressed: the head keeps the share, the other heads keep the
    baseline. Then the answer is fed. The loss is the distance of the next token's distribution from the full cache's.
    Afterwards shares are exchanged between heads as long as one head gains more than another loses. A sample without
    an "answer" uses the model's answer with the full cache. The number of measurements is heads x points x samples;
    after the first ones the command prints how long all take. With --save a stopped run can continue later. A second
    run with --around and the first run's profile measures what the heads miss together. Its result fits one method,
    so pass the method with --method.

    \b
    Your own samples (--data), one a line; what was said before is optional:
      {"image": "shop.jpg", "question": "What is on the sign?", "answer": "Open",
       "earlier": [{"question": "What is it?", "answer": "A shop."}]}

    \b
    Examples:
      kvedge calibrate budgets
      kvedge calibrate budgets -m m.gguf --data signs.jsonl --points 8
      kvedge calibrate budgets --output once.json
      kvedge calibrate budgets --around once.json --method kvedge
      kvedge chat -m m.gguf --image a.jpg --method calibrated "What is this?"
    """
    from kvedge_lab.calibrate.budgets import METHOD, setup_for
    from kvedge_lab.calibrate.exchange import check_targets
    from kvedge_lab.eval.measure import CONVERSATION

    wanted, baseline, ways = _shares("--targets", given["targets"]), given["baseline"], given["compress"].split(",")
    check_targets(wanted)
    scorer = scorer or (SCORER if method == METHOD else None)
    setup = setup_for(scorer, baseline, points, wanted, method, ways, options.changes(given))
    if not 1 <= given["questions"] <= MAX_QUESTIONS:
        raise UsageError(f"--questions must be 1 to {MAX_QUESTIONS}, not {given['questions']}")
    if given["resume"] and given["save"] is None:
        raise UsageError("--resume needs the file of losses: add --save FILE")
    model, values, found = _measured(given, setup, seed, samples)
    command = f"kvedge calibrate budgets --samples {samples} --points {points}"
    command += f" --method {method}" if method != METHOD else ""
    command += f" --scorer {setup.plan.scorer} --baseline {baseline:g} --targets {given['targets']} --seed {seed}"
    command += "".join(f" --set {change}" for change in given["changes"])
    command += f" --questions {given['questions']}" if given["questions"] > 1 else ""
    command += f" --compress {given['compress']}" if setup.ways != (CONVERSATION,) else ""
    command += f" --around {given['around'].name}" if given["around"] is not None else ""
    made = {"command": command, "baseline_loss": float(f"{found.baseline:.4g}")}
    _deliver(given, model, "head-budgets", values, (), found.samples, made)


def _measured(given: dict[str, Any], setup: Setup, seed: int, count: int) -> tuple[Model, Any, Curves]:
    """Returns the closed model, its heads' shares, and the curves behind the shares."""
    from kvedge_lab.calibrate.budgets import CurveFile, measure_curves
    from kvedge_lab.eval.reader import reading
    from kvedge_lab.progress import clock
    from pykvedge.models.profiles import find
    from pykvedge.runtime.loaded import borrow
    from pykvedge.runtime.settings import Settings

    model, mmproj = model_files(given)
    if given["around"] is not None:
        setup = replace(setup, around=find(plan("calibrated"), model, given["around"])["allocator"].values)
    settings, source = Settings.of(options.running(given)), _samples(given, "head-budgets", seed, given["questions"])
    own = source if isinstance(source, list) else []
    count = min(count, len(own)) if own else count
    header = setup.header(model, given["data"] or _drawn(seed, given["questions"]), own, mmproj)
    with _interruptible(given) as (display, cancel), ExitStack() as held:
        kept = CurveFile(given["save"], header, len(setup.points), given["resume"])
        held.callback(kept.close)
        loan = borrow(model, mmproj, settings, display, cancel)
        held.callback(loan.give_back)
        reader = held.enter_context(reading(loan, settings, cancel, N_OUTPUTS))

        def on_estimate(runs: int, seconds: float) -> Any:
            if not given["quiet"]:
                display.say(f"{runs} measurements, about {clock(seconds)}")
            display.skip(1 - runs)
            return display.step

        found = measure_curves(reader, setup, source, count, kept, on_estimate, cancel)
        return loan.model, found.shares(setup, loan.model.n_layer), found


def _shares(name: str, text: str) -> list[float]:
    try:
        return [float(x) for x in text.split(",")]
    except ValueError:
        raise UsageError(f"{name} must be shares such as 0.1,0.2,0.5, not '{text}'") from None


def _drawn(seed: int, questions: int) -> str:
    return f"scenes of seed {seed}" + (f", up to {questions} questions" if questions > 1 else "")


def _samples(given: dict[str, Any], kind: str, seed: int | None = None, questions: int = 1) -> Iterable[Labelled]:
    from kvedge_lab.calibrate.samples import SEED, read_jsonl, scenes

    if given["data"] is None:
        return scenes(kind, SEED if seed is None else seed, questions)
    found = read_jsonl(given["data"])
    if kind != "head-budgets" and any(sample.earlier for sample in found):
        raise UsageError(f'{given["data"].name}: only kvedge calibrate budgets allows "earlier" questions; remove them')
    return found


@contextmanager
def _session(given: dict[str, Any]) -> Iterator[tuple[Session, Any, threading.Event]]:
    """Yields a session that keeps everything. Ctrl-C stops it, and then nothing is written."""
    from pykvedge.chat.session import Session

    model, mmproj = model_files(given)
    with _interruptible(given) as (display, cancel), ExitStack() as held:
        session = Session(model, mmproj, plan("full"), progress=display, cancel=cancel, **options.running(given))
        yield held.enter_context(session), display, cancel


@contextmanager
def _interruptible(given: dict[str, Any]) -> Iterator[tuple[Steps, threading.Event]]:
    """Yields a display, and an event that Ctrl-C sets. After Ctrl-C nothing is written."""
    from kvedge_lab.progress import Steps
    from pykvedge.models import profiles
    from pykvedge.runtime.interrupt import CancelledError, as_event

    if given["output"] is None:
        common.check_folder(profiles.folder())
    common.check_file("--output", given["output"])
    with as_event(threading.Event()) as cancel, Steps(enabled=not given["quiet"]) as display:
        try:
            yield display, cancel
        except CancelledError:
            display.say("kvedge: stopped; no profile was written")
            raise


def _deliver(
    given: dict[str, Any], model: Model, kind: str, values: Any, budgets: tuple[float, ...], samples: int, made: Any
) -> None:
    from pykvedge.models import profiles

    made["data"] = given["data"].name if given["data"] else "scenes drawn by kvedge"
    done, place = profiles.save(model.header, kind, values, samples, made, budgets, given["output"])
    if given["as_json"]:
        click.echo(json.dumps({"file": str(place), "profile": json.loads(done.to_json())}))
        return
    click.echo(_table(done))
    click.echo(f"written to {place}")


def _table(profile: Profile) -> str:
    """Returns rows of layers in percent: scores of heads as parts of the sum; shares and redundancies unchanged.

    Budgets of heads are percent of an even budget.
    """
    is_prefix = profile.kind == "prefix"
    whole = profile.values.sum() if profile.kind in ("visual-heads", "retrieval-heads") else 1
    if profile.kind == "head-budgets":
        whole = 1 / max((profile.values > 0).sum(), 1)
    names = [f"{b:g}" for b in profile.budgets] if is_prefix else [f"head {h}" for h in range(profile.values.shape[1])]
    shown = 100 * profile.values / whole
    what = {
        "prefix": "percent of the prompt kept at each budget",
        "key-redundancy": "mean similarity of two keys in percent",
        "head-budgets": "percent of an even share of the budget",
    }.get(profile.kind, "percent of all scores")
    lines = [f"{profile.kind} of {profile.about['model']['name']}, {counted(profile.samples, 'sample')}: {what}"]
    if len(names) > 16:
        best = [divmod(int(i), len(names)) for i in (-shown).argsort(axis=None)[:16]]
        return "\n".join([*lines, *(f"  layer {i}, {names[h]}: {shown[i, h]:.1f}" for i, h in best)])
    lines.append("layer  " + " ".join(name.rjust(8) for name in names))
    return "\n".join([*lines, *(f"{i:5d}  " + " ".join(f"{x:8.1f}" for x in row) for i, row in enumerate(shown))])
