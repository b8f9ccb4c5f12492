"""Tests whether a probe tells the budget that a prompt needs. It does not, so there is no `--budget auto`.

    nice -n 10 python3 scripts/dev.py python experiments/try_probes.py --of scenes --contexts 40 --save probes

After the prefill all rows exist, so the full cache and the kept rows can answer side by side. later: some questions
about the pictures are the probe; another question judges the budget that they choose. prompt: the first tokens of the
answer are the probe; the tokens after them are judged, in fixed budgets too. The chosen budget is the smallest at which
no token of the probe diverges by more than a threshold. Prints, for probes and thresholds: the mean budget, the mean of
ln(1 + KL) over answers, and the share of answers with a token that diverges by more than 0.1 nats; beside a mixture of
fixed budgets with the same mean, and the 95 % interval of the gain, over contexts. "best" knows each answer's loss.
Data: validation scenes, held-out pages. The same command continues an interrupted run; --minutes 0 only prints; records
of measure_pages.py can be used.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import scriptpath  # noqa: F401
from measure_pages import DATA as PAGES
from measure_pages import WAYS, context
from measure_questions import DATA as SCENES

import pykvedge
from kvedge_lab.demo_tasks import evalset
from kvedge_lab.eval.measure import Cell, MeasureOptions
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import Job, evaluate
from kvedge_lab.eval.tasks import DialogMessage, Sample
from pykvedge.runtime.settings import Settings

BUDGETS = (0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
THRESHOLDS = (0.001, 0.01, 0.1)
LOST = 0.1  # nats; a token above it counts as lost
DRAWS = 2000
Klds = dict[float, list[float]]  # budget -> divergence of each token of an answer


def scenes(seed: int, count: int) -> list[list[Sample]]:
    """Returns contexts of one scene with three questions each."""
    out = []
    for n, (found, asked) in enumerate(
        itertools.islice(evalset.chain(("describe", "code", "where"), seed, 1, "validation"), count)
    ):
        lines = [(DialogMessage("user", one.text, found),) for one in asked]
        out.append([Sample(f"{n}:{i}", "scene", lines[i], one.answer, context=f"{seed}:{n}")
                    for i, one in enumerate(asked)])  # fmt: skip
    return out


def loss(klds: list[float]) -> float:
    return float(np.log1p(np.mean(klds)))


def probes(way: str, count: int) -> dict[str, Callable[[list[Klds]], list[tuple[Klds, Klds]]]]:
    """Returns, by the probe's name, functions that make (probe, judged) of a context's answers (count questions)."""
    if way == "prompt":
        return {f"the first {n} tokens": partial(_beginnings, n) for n in (1, 3, 8, 16, 32)}
    each: dict[str, Callable[[list[Klds]], list[tuple[Klds, Klds]]]] = {
        f"question {i + 1}": partial(_asked_first, i) for i in range(count)
    }
    return {**each, "all other questions": _all_others}


def _beginnings(n: int, answers: list[Klds]) -> list[tuple[Klds, Klds]]:
    longer = [one for one in answers if len(next(iter(one.values()))) > n]
    return [({b: ks[:n] for b, ks in one.items()}, {b: ks[n:] for b, ks in one.items()}) for one in longer]


def _asked_first(i: int, answers: list[Klds]) -> list[tuple[Klds, Klds]]:
    return [(answers[i], one) for one in answers if one is not answers[i]]


def _all_others(answers: list[Klds]) -> list[tuple[Klds, Klds]]:
    return [({b: [k for other in answers if other is not one for k in other[b]] for b in one}, one) for one in answers]


def judged(contexts: list[list[tuple[Klds, Klds]]], choose: Callable[[Klds, Klds], float]) -> np.ndarray:
    """Returns [contexts, 4]: mean chosen budget, mean loss, share of answers with a lost token, number of answers."""
    rows = []
    for of in contexts:
        chosen = [choose(probe, after) for probe, after in of]
        found = [after[b] for b, (_, after) in zip(chosen, of, strict=True)]
        rows.append([np.mean(chosen), np.mean([loss(ks) for ks in found]), np.mean([max(ks) > LOST for ks in found]),
                     len(of)])  # fmt: skip
    return np.array(rows)


def beside(fixed: dict[float, np.ndarray], budget: float) -> np.ndarray:
    """Mixes the two fixed budgets around a mean budget. Returns [contexts, 4]."""
    budgets = sorted(fixed)
    high = next((b for b in budgets if b >= budget), budgets[-1])
    low = max((b for b in budgets if b < high), default=high)
    share = (budget - low) / (high - low) if high > low else 1.0
    return (1 - share) * fixed[low] + share * fixed[high]


def compared(found: np.ndarray, fixed: dict[float, np.ndarray]) -> str:
    weights = found[:, 3]
    budget = float(np.average(found[:, 0], weights=weights))
    other = beside(fixed, budget)
    draws = np.random.default_rng(0).multinomial(len(found), np.full(len(found), 1 / len(found)), size=DRAWS) * weights
    saved = (draws @ (other[:, 1] - found[:, 1])) / draws.sum(axis=1)
    low, high = np.quantile(saved, [0.025, 0.975])
    mine, theirs = (np.average(of, axis=0, weights=weights) for of in (found, other))
    return (f"budget {budget:.3f}  ln(1 + KL) {mine[1]:.4f}, fixed {theirs[1]:.4f} (less by {low:+.4f} to {high:+.4f})"
            f"  lost {100 * mine[2]:.0f} %, fixed {100 * theirs[2]:.0f} %")  # fmt: skip


def report(contexts: list[list[tuple[Klds, Klds]]]) -> None:
    budgets = sorted(contexts[0][0][0])

    def smallest(limit: float, klds: Klds) -> float:
        return next((b for b in budgets if max(klds[b]) < limit), budgets[-1])

    fixed = {b: judged(contexts, lambda probe, after, b=b: b) for b in budgets}
    for limit in THRESHOLDS:
        found = judged(contexts, lambda probe, after, t=limit: smallest(t, probe))
        print(f"  below {limit:g}: {compared(found, fixed)}")
    best = judged(contexts, lambda probe, after: smallest(LOST, after))
    print(f"  best: {compared(best, fixed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=("scenes", "pages"), required=True)
    parser.add_argument("--way", choices=WAYS, action="append", help="default: both")
    parser.add_argument("--contexts", type=int, default=40)
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--save", type=Path, required=True, metavar="FILE", help="of records: FILE-WAY.jsonl")
    args = parser.parse_args()
    folder, model = (PAGES, "pages") if args.of == "pages" else (SCENES, "demo")
    drawn = scenes(args.seed, args.contexts) if args.of == "scenes" else [
        context(args.seed, n) for n in range(args.contexts)]  # fmt: skip
    cells = [Cell("kvedge", pykvedge.plan("kvedge", float(b))) for b in args.budgets.split(",")]
    stop = threading.Event()
    if args.minutes:
        timer = threading.Timer(60 * args.minutes, stop.set)
        timer.daemon = True
        timer.start()
    for way in args.way or WAYS:
        options = MeasureOptions(answers=args.of == "pages", compress=WAYS[way])
        job = Job(folder / f"{model}-model.gguf", folder / f"{model}-mmproj.gguf", [s for of in drawn for s in of],
                  cells, options, Settings(threads=1))  # fmt: skip
        save = Path(f"{args.save}-{way}.jsonl")
        records = Records(save, job.header(), save.exists())
        if args.minutes:
            evaluate(job, records, cancel=stop)
        found = [[{c.budget: row["klds"] for c in cells if (row := records.rows.get((one.id, *c.key)))} for one in of]
                 for of in drawn]  # fmt: skip
        whole = [answers for answers in found if all(len(one) == len(cells) for one in answers)]
        for name, probe in probes(way, len(drawn[0])).items():
            contexts = [made for answers in whole if (made := probe(answers))]
            print(f"{args.of}, {way}, {name}: {len(contexts)} contexts, {sum(map(len, contexts))} answers")
            if contexts:
                report(contexts)


if __name__ == "__main__":
    try:
        main()
    except pykvedge.KvedgeError as error:
        sys.exit(f"error: {error}")
