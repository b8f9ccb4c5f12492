"""Searches the product of stages and settings for the plan with the least loss at a budget, on the packaged model.

    python3 scripts/dev.py python experiments/search_plans.py --budget 0.2,0.1 --save search.jsonl

Every composition is measured on few samples of each task, the better quarter on four times as many, and so on
(successive halving, experiments/search.py). The best of the last round are measured on validation scenes beside every
named method. No scene is in two parts. A question is asked in two ways: compressed with the text before it
("conversation"), and after only that text was compressed ("context"). A plan can be good in one way and bad in the
other. Prints JSON: the best plans of every budget. With --save the same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401
from llama_source import ROOT, log
from measure_questions import with_texture
from search import Space, Standing, halving, standings

from kvedge_lab.eval.measure import CONTEXT, CONVERSATION, Cell, MeasureOptions
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import FULL, Job, evaluate, full_cell
from kvedge_lab.eval.tasks import Sample, demo_samples
from pykvedge.errors import KvedgeError
from pykvedge.plans.making import plan
from pykvedge.plans.presets import methods
from pykvedge.runtime.settings import Settings

DATA = ROOT / "pykvedge" / "data"
TASKS = (  # first, second and third questions about one image and about several
    "describe",
    "code",
    "difference",
    "code-in-image-k",
    "where+code",
    "code+describe",
    "which-image+code-in-image-k",
    "colour+where+describe",
    "describe+where+code",
    "code-in-image-k+which-image+code-in-image-k",
)
SPACE = Space(
    scorers={
        "window": [{}, {"scorer.window": 8}, {"scorer.window": 8, "scorer.pool": "max"}, {"scorer.window": 64}],
        "mixkv": [
            {},
            {"scorer.window": 8},
            {"scorer.window": 16},
            {"scorer.window": 24, "scorer.parts": 3},
            {"scorer.window": 64},
        ],
        "modal": [{}, {"scorer.parts": 2}, {"scorer.parts": 4}, {"scorer.window": 16}, {"scorer.fade": 0.3}],
        "cumulative": [{}, {"scorer.share": "layer"}],
        "mean": [{}],
        "keydiff": [{}],
        "expected": [{}],
        "replay": [{}, {"scorer.source": "repeat"}],
        "knorm": [{}],
        "vnorm": [{}],
        "dct": [{}],
    },
    allocators={
        "uniform": [{}],
        "pyramid": [{}],
        "ada": [{}],
        "global": [{}, {"allocator.own": 0.2}],
        "heads": [{}, {"allocator.rule": "headkv"}],
        "calibrated": [{}],
        "prefix": [{}],
        "spectral": [{}],
        "entropy": [{}],
    },
    reducers={
        "evict": [{}],
        "averaged": [{}, {"reducer.bias": "mass"}],
        "pivotal": [{}],
        "nearest": [{}, {"reducer.reach": 0.6}, {"reducer.reach": 1.0}],
        "weighted": [{}],
        "match": [{}, {"reducer.bias": "none"}],
    },
    others=({}, {"recent": 8}, {"recent": 1, "sinks": 1}, {"text_prior": True}, {"critical": "l2"}),
)


class Search:
    """Measures cells on scenes of one part. compress: CONTEXT or CONVERSATION."""

    def __init__(self, args: argparse.Namespace, part: str, compress: str) -> None:
        self.args, self.part, self.compress = args, part, compress
        self.folder = tempfile.TemporaryDirectory()  # holds textured pictures
        self.options = MeasureOptions(answers=part != "search", compress=compress)
        path = None if args.save is None else args.save.with_suffix(f".{compress}.{part}{args.save.suffix}")
        self.records = Records(path, self.job([], []).header(), path is not None and path.exists())

    def job(self, samples: list[Sample], cells: Sequence[Cell]) -> Job:
        settings = Settings(threads=self.args.threads)
        return Job(self.args.model, self.args.mmproj, samples, list(cells), self.options, settings)

    def measure(self, count: int, cells: Sequence[Cell]) -> list[Standing]:
        plain = [s for name in self.args.tasks for s in demo_samples(name, count, self.args.seed, 4, self.part)]
        samples = [one for strength in self.args.texture for one in self.textured(plain, strength)]
        log(f"{self.part}, {self.compress}: {len(cells)} plans on {len(samples)} samples")
        out = evaluate(self.job(samples, [full_cell(), *cells]), self.records)
        for line in out.left_out[:5]:
            log(line)
        if out.interrupted:
            sys.exit(130)
        return standings(cells, samples, self.records.rows)

    def textured(self, samples: list[Sample], strength: int) -> list[Sample]:
        made = (with_texture(one, strength, Path(self.folder.name)) for one in samples)
        return [replace(one, task=f"{one.task}, texture {strength}" if strength else one.task) for one in made]


class Together:
    """Measures cells in each way to compress. The tasks of each way count as separate tasks."""

    def __init__(self, args: argparse.Namespace, part: str) -> None:
        self.of = [Search(args, part, compress) for compress in args.compress]

    def measure(self, count: int, cells: Sequence[Cell]) -> list[Standing]:
        found = [(s.compress, {one.cell.key: one for one in s.measure(count, cells)}) for s in self.of]
        out = []
        for cell in cells:
            own = [(how, by_key[cell.key]) for how, by_key in found if cell.key in by_key]
            if len(own) == len(self.of):
                loss = {f"{task}, {how}": x for how, one in own for task, x in one.loss.items()}
                agrees = {f"{task}, {how}": x for how, one in own for task, x in one.agrees.items()}
                out.append(Standing(cell, loss, agrees))
        return out


def without(space: Space, names: set[str]) -> Space:
    """Returns the space without the members of these names."""
    stages = ("scorers", "allocators", "reducers")
    left = {stage: {k: v for k, v in getattr(space, stage).items() if k not in names} for stage in stages}
    return replace(space, **left)


def one(standing: Standing) -> dict[str, Any]:
    return {
        "plan": json.loads(standing.cell.plan.to_json()),
        "name": standing.cell.name,
        "loss": round(standing.mean, 5),
        "loss_by_task": {task: round(value, 5) for task, value in standing.loss.items()},
        "least_agreement": round(min(standing.agrees.values()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="0.2", help="one or several, with commas (default %(default)s)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of the demo generator (default %(default)s)")
    parser.add_argument("--without", default="", metavar="A,B", help="members of stages that are not tried")
    parser.add_argument("--model", type=Path, default=DATA / "demo-model.gguf")
    parser.add_argument("--mmproj", type=Path, default=DATA / "demo-mmproj.gguf")
    parser.add_argument("--compress", default=f"{CONTEXT},{CONVERSATION}", help="one or both (default %(default)s)")
    parser.add_argument("--texture", default="0,16", help="strengths of texture, 0: plain (default %(default)s)")
    parser.add_argument("--rounds", default="1,4,16", help="samples of each task in every round (default %(default)s)")
    parser.add_argument("--keep", type=float, default=0.2, help="share of plans that goes on (default %(default)s)")
    parser.add_argument("--floor", type=float, default=0.5, help="least agreement with the full cache in any task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl", help="keep every measurement, and go on from there")
    parser.add_argument("--best", type=int, default=5, help="plans of each budget that are validated and told")
    args = parser.parse_args()
    args.tasks, rounds = args.tasks.split(","), [int(n) for n in args.rounds.split(",")]
    args.texture, args.compress = [int(n) for n in args.texture.split(",")], args.compress.split(",")
    if not {*args.compress} <= {CONTEXT, CONVERSATION}:
        parser.error(f"--compress is {CONTEXT}, {CONVERSATION}, or both with a comma")
    space = without(SPACE, set(args.without.split(",")))
    search, validation, out = Together(args, "search"), Together(args, "validation"), {}
    for budget in args.budget.split(","):
        cells = list(space.cells(budget))
        found = halving(cells, rounds, args.keep, args.floor, search.measure)[: args.best]
        named = [Cell(name, plan(name, budget)) for name in methods() if name != FULL]
        seen = validation.measure(rounds[-1], [*(s.cell for s in found), *named])
        seen.sort(key=lambda standing: standing.order(args.floor))
        out[budget] = {"tried": len(cells), "search": [one(s) for s in found], "validation": [one(s) for s in seen]}
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    try:
        main()
    except KvedgeError as error:
        sys.exit(f"error: {error}")
