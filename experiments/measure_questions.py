"""Counts right answers when the context is compressed before its question is known: every method, by question.

    python3 scripts/dev.py python experiments/measure_questions.py --samples 60 --save q.jsonl --json q.json > q.md

The judged question is the first, second or third about one image or four; earlier questions have the reference answers.
Everything before the judged question is compressed at once, then the question is read (`kvedge eval --compress
context`); with --compress conversation the question is compressed too. The scenes are the test part, which no search or
validation uses. A texture of 16 adds waves, grain and scraps of up to 16 of 255 to every picture. Prints a Markdown
table for each budget; with --save the same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import scriptpath  # noqa: F401
from llama_source import ROOT, log
from measure_pruners import textured
from PIL import Image

from kvedge_lab.demo_tasks.scenes import Scene, render
from kvedge_lab.eval.measure import CONTEXT, CONVERSATION, Cell, MeasureOptions
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import FULL, Job, evaluate, full_cell
from kvedge_lab.eval.table import ALL, ResultRow, lines
from kvedge_lab.eval.tasks import Sample, demo_samples
from pykvedge.cli.tables import markdown
from pykvedge.errors import KvedgeError
from pykvedge.models import profiles
from pykvedge.plans.making import plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import methods
from pykvedge.runtime.settings import Settings

DATA = ROOT / "pykvedge" / "data"
GROUPS = {
    "1st, 1 image": ("code", "where", "describe"),
    "2nd, 1 image": ("where+code", "colour+where", "code+describe"),
    "3rd, 1 image": ("describe+where+code", "code+colour+where", "colour+where+describe"),
    "1st, 4 images": ("which-image", "code-in-image-k"),
    "2nd, 4 images": ("code-in-image-k+which-image", "which-image+code-in-image-k"),
    "3rd, 4 images": (
        "code-in-image-k+code-in-image-k+which-image",
        "code-in-image-k+which-image+code-in-image-k",
    ),
}


def drawn(args: argparse.Namespace, folder: Path) -> list[Sample]:
    """Draws equally many samples of each group, evenly from its tasks."""
    out = []
    for group, tasks in GROUPS.items():
        for i, task in enumerate(tasks):
            count = len(range(i, args.samples, len(tasks)))
            of = demo_samples(task, count, args.seed, 4, "test")
            out += [replace(with_texture(s, args.texture, folder), task=group) for s in of]
    return out


def with_texture(sample: Sample, strength: int, folder: Path) -> Sample:
    """Returns the sample with textured pictures in files. strength 0: the sample unchanged."""
    if not strength:
        return sample

    def picture(number: int, image: Path | Scene) -> Path:
        path = folder / f"{sample.id.replace(':', '-').replace('/', '-')}-{number}.png"
        rng = np.random.default_rng((strength, number, *sample.id.encode()))
        assert isinstance(image, Scene)
        Image.fromarray(textured(render(image), rng, strength)).save(path)
        return path

    first = replace(sample.lines[0], images=tuple(picture(i, one) for i, one in enumerate(sample.lines[0].images)))
    return replace(sample, lines=(first, *sample.lines[1:]), id=f"{sample.id}:{strength}")


def cells_of(args: argparse.Namespace) -> list[Cell]:
    names = [name for name in methods() if name != FULL] if args.method == "all" else args.method.split(",")
    out = [Cell(name, plan(name, budget)) for budget in args.budget.split(",") for name in names if name]
    for path in args.plan:
        made = Plan.from_json(path.read_text())
        out.append(Cell(path.stem, made))
    return out


def table(made: list[ResultRow], budget: float | int, against: str) -> str:
    """Returns a row for each method: percent right, interval of the difference, divergence in nats a token."""
    other = against != FULL
    rows = [["method", *GROUPS, "all", f"to {against}", "KL to full", *([f"less that of {against}"] * other)]]
    for name in dict.fromkeys(line.method for line in made):
        here = {line.task: line for line in made if line.method == name and (line.budget == budget or name == FULL)}
        if not here:
            continue
        whole = here[ALL]
        low, high = whole.score_change or (0.0, 0.0)
        change = "" if whole.score_change is None else f"{100 * low:+.1f} to {100 * high:+.1f}"
        shares = [f"{100 * (here[group].score or 0):.0f}" for group in GROUPS]
        own = [f"{100 * (whole.score or 0):.1f}", change, f"{whole.kld or 0:.{6 if other else 3}f}"]
        farther = "" if whole.kld_change is None else "{:+.6f} to {:+.6f}".format(*whole.kld_change)
        rows.append([f"`{name}`", *shares, *own, *([farther] * other)])
    return markdown(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="all", help="one or several, with commas (default: every one)")
    parser.add_argument("--plan", type=Path, action="append", default=[], metavar="FILE.json", help="repeatable")
    parser.add_argument("--budget", default="0.5,0.2,0.1,0.05")
    parser.add_argument("--samples", type=int, default=60, help="of each kind of question (default %(default)s)")
    parser.add_argument("--against", default=FULL, help="what intervals are against (default: the full cache)")
    parser.add_argument("--compress", choices=(CONTEXT, CONVERSATION), default=CONTEXT, help="default: %(default)s")
    parser.add_argument("--texture", type=int, default=0)
    parser.add_argument("--without-profiles", action="store_true", help="as for a model that nobody calibrated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=DATA / "demo-model.gguf")
    parser.add_argument("--mmproj", type=Path, default=DATA / "demo-mmproj.gguf")
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl", help="keep every measurement, and go on from there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        if args.without_profiles:
            profiles.SHIPPED = Path(folder)
            os.environ["XDG_CONFIG_HOME"] = folder
        cells = cells_of(args)
        log("drawing questions; those about four images of one part take a second each")
        samples = drawn(args, Path(folder))
        options = MeasureOptions(compress=args.compress)
        job = Job(args.model, args.mmproj, samples, cells, options, Settings(threads=args.threads))
        records = Records(args.save, job.header(), args.save is not None and args.save.exists())
        log(f"{len(cells)} plans on {len(samples)} samples")
        out = evaluate(job, records)
    for line in out.left_out[:5]:
        log(line)
    if out.interrupted:
        sys.exit(130)
    made = lines(records.rows, samples, [full_cell(), *cells], args.against)
    for budget in dict.fromkeys(cell.budget for cell in cells):
        print(f"\n## Budget {budget}\n\n{table(made, budget, args.against)}")
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in made], indent=1))


if __name__ == "__main__":
    try:
        main()
    except KvedgeError as error:
        sys.exit(f"error: {error}")
