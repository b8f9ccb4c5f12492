"""Measures how often the statements of `kvedge tune` are true.

    nice -n 10 python3 scripts/dev.py python experiments/check_tune.py --pool 200 --save pool.jsonl

All plans are measured once on a pool of contexts. Then runs are simulated: contexts are drawn from the pool with
replacement, `kvedge tune` decides with them, and its statements are compared with the figures of the whole pool, which
are the truth here. Prints one JSON object: how many runs took a plan; in how many of these the stated interval contains
the truth and the truth reaches the target; how many took a plan worse than the default in both bytes and agreement. The
same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import scriptpath  # noqa: F401
from llama_source import log

import pykvedge
from kvedge_lab.eval import metrics
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.tasks import Sample
from kvedge_lab.progress import Steps
from kvedge_lab.tune import certificate, figures, material
from kvedge_lab.tune.race import Race, RaceRecords
from pykvedge.plans.making import default_plan, plan
from pykvedge.runtime.settings import Settings

metrics.REPEATS = 20  # intervals of KL divergence decide nothing, but take most of the time
NONE = {"top1": 1.0, "exact": 1.0}


def race(args: argparse.Namespace, cells: list[Cell], of: material.Material, kept: RaceRecords, loan: object) -> Race:
    return Race(loan, Settings(threads=1), of, list(cells), cells[0], args.target, 1e8, kept, Steps(enabled=False),
                threading.Event())  # type: ignore[arg-type]


def pool(args: argparse.Namespace, cells: list[Cell]) -> Race:
    drawn = material.scenes(args.seed, [])
    of = material.Material(drawn.source, itertools.islice(drawn.contexts, args.pool), size=args.pool)
    kept = RaceRecords(args.save, {"seed": args.seed, "plans": [cell.digest for cell in cells]})
    with pykvedge.load(threads=1) as loaded:
        loan = loaded.lend()
        out = race(args, cells, of, kept, loan)
        with out._reading() as reader:  # measures all plans on all contexts, without a time limit
            out._begin(reader)
            for n in itertools.count():
                if not out._reach(n):
                    break
                out._context(n, out.cells)
        loan.give_back()
    return out


def drawn(args: argparse.Namespace, cells: list[Cell], of: Race, number: int) -> Race:
    """Returns a run with contexts drawn from the pool. All its measurements are already known."""
    rng = np.random.default_rng((args.seed, number))
    kept, contexts = RaceRecords(None, {}), list[list[Sample]]()
    alone = [context for context in of.contexts if len(context[0].lines[0].images) == 1]
    several = [context for context in of.contexts if len(context[0].lines[0].images) > 1]
    for n in range(args.contexts):
        kind = several if n % 4 >= 2 else alone
        context = kind[int(rng.integers(len(kind)))]
        contexts.append([replace(one, id=f"{n}:{one.id}") for one in context])
        for one, was in zip(contexts[-1], context, strict=True):
            for cell in (("full", "1.0"), *(cell.key for cell in cells)):
                kept.rows[(one.id, *cell)] = {**of.kept.rows[(was.id, *cell)], "digest": one.digest()}
    out = race(args, cells, material.Material("", iter(())), kept, None)
    out.contexts = contexts
    out.decide()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=200, help="contexts (default %(default)s)")
    parser.add_argument("--contexts", type=int, default=48, help="of a run (default %(default)s)")
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--targets", default="0.99,0.97,0.95")
    parser.add_argument("--plans", default="kvedge:0.1,kvedge:0.05,kvzip:0.05,mixkv:0.1")
    parser.add_argument("--seed", type=int, default=10**6)
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl")
    args = parser.parse_args()
    named = [plan(*one.split(":")) for one in args.plans.split(",")]
    cells = [Cell(one.method, one) for one in (default_plan(), *named)]
    args.target = 0.99
    of = pool(args, cells)
    log(f"{len(of.contexts)} contexts in the pool")
    true = figures.figures(cells, of.kept.rows, of.contexts, NONE)
    out = {"pool": len(of.contexts), "contexts of a run": args.contexts, "truth": {
        f"{name} {budget}": [round(one.agreement, 4), round(one.bytes, 4)] for (name, budget), one in true.items()
    }}  # fmt: skip
    for target in args.targets.split(","):
        args.target = float(target)
        out[target] = tally(args, cells, of, true)
    print(json.dumps(out, indent=1))


def tally(args: argparse.Namespace, cells: list[Cell], of: Race, true: dict) -> dict:
    count, taken = Counter[str](), Counter[str]()
    usual = true[cells[0].key]
    for number in range(args.runs):
        run = drawn(args, cells, of, number)
        proof = run.figures(run.proving, run.finalists, len(run.finalists))
        count["finalists"] += len(proof)
        count["finalists hold"] += sum(one.low <= true[key].agreement <= one.high for key, one in proof.items())
        said = certificate.verdict(run)
        if said.taken is None or said.why or said.proof is None:
            taken["none"] += 1
            continue
        mine = true[said.taken.key]
        taken[f"{mine.method} {mine.budget}"] += 1
        count["taken"] += 1
        count["taken holds"] += said.proof.low <= mine.agreement <= said.proof.high
        count["taken holds from below"] += said.proof.low <= mine.agreement
        count["taken reaches the target"] += mine.agreement >= args.target
        costs_more = mine.key != usual.key and mine.bytes >= usual.bytes
        count["worse in both"] += costs_more and mine.agreement <= usual.agreement
    return {"runs": args.runs, **count, "plans": dict(taken)}


if __name__ == "__main__":
    main()
