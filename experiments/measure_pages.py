"""Measures the loss of every method on the second model, which reads pages: exact answers, likeliest token, divergence.

    python3 scripts/dev.py python experiments/measure_pages.py --way later --minutes 60 --save later.jsonl
    python3 scripts/dev.py python experiments/measure_pages.py --way prompt --minutes 60 --save prompt.jsonl

A context has three held-out pages, one of each kind, and a question of each task. later: the pages are compressed, then
the question is read. prompt: the question is compressed with the pages. In every second context, a turn that only shows
the pages comes before the question. The same command continues an interrupted run; --minutes 0 only prints. A context
counts if all plans were measured on it. Percent with 95 % intervals, over contexts.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import scriptpath  # noqa: F401
from llama_source import ROOT, log

from kvedge_lab.demo_tasks.prompts import MEDIA, messages
from kvedge_lab.eval.measure import CONTEXT, CONVERSATION, Cell, MeasureOptions
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import FULL, Job, evaluate, full_cell, lacking
from kvedge_lab.eval.table import ALL, lines
from kvedge_lab.eval.tasks import IMAGE, PAGES, DialogMessage, Sample
from kvedge_lab.page_tasks.pages import KINDS, Page, draw_page
from kvedge_lab.page_tasks.tasks import ASKERS, KIND_OF, TASKS, Question
from pykvedge.cli.tables import markdown
from pykvedge.errors import KvedgeError, ProfileError
from pykvedge.models.profiles import tables_for
from pykvedge.plans.making import plan
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import methods
from pykvedge.runtime.settings import Settings

DATA = ROOT / "tests" / "data" / "pages"
LEARNT = tuple(task for task in TASKS if task != "which-line")  # which-line is out: 18 % right (docs/results/second.md)
WAYS = {"later": CONTEXT, "prompt": CONVERSATION}


def asked(rng: np.random.Generator, pages: Sequence[Page], task: str) -> Question:
    fitting = [k for k, page in enumerate(pages) if KIND_OF.get(task, page.kind) == page.kind]
    while True:
        question = ASKERS[task](rng, pages, int(rng.choice(fitting)))
        if question is not None:
            return question


def context(seed: int, number: int) -> list[Sample]:
    """Returns the samples of a context: one of each task."""
    rng, second = np.random.default_rng((seed, number)), number % 2 == 1
    pages = tuple(draw_page(rng, True, KINDS[int(k)]) for k in rng.permutation(len(KINDS)))
    out = []
    for task in LEARNT:
        question = asked(rng, pages, task)
        said = messages(len(pages), question.text, second, "page")
        turns = [
            DialogMessage(m["role"], m["content"].replace(MEDIA, IMAGE), () if n else pages)
            for n, m in enumerate(said)
        ]
        out.append(Sample(f"{number}:{task}", f"{PAGES}{task}", tuple(turns), question.answer, max_tokens=16,
                          context=f"{seed}:{number}"))  # fmt: skip
    return out


def cells_of(args: argparse.Namespace) -> list[Cell]:
    names = [name for name in methods() if name != FULL] if args.method == "all" else args.method.split(",")
    out = [Cell(name, plan(name, budget)) for name in names if name for budget in args.budget.split(",")]
    out += [Cell(path.stem, Plan.from_json(path.read_text())) for path in args.plan]
    why = {cell.key: problem(cell.plan, args.model) for cell in out}
    for line in sorted({line for line in why.values() if line}):
        log(f"left out: {line}")
    return [cell for cell in out if not why[cell.key]]


def problem(plan: Plan, model: Path) -> str:
    """Returns the error about a missing profile; "" if no profile is missing."""
    try:
        tables_for(plan, model)
    except ProfileError as error:
        return str(error)
    return ""


def between(low: float, high: float) -> str:
    return f"{100 * low:+.0f} to {100 * high:+.0f}"


def table(made: list, by: str) -> str:
    rows = [["method", "budget", "exact, %", f"more than {by}", "same token, %", "KL, nats", f"more than that of {by}"]]
    for line in sorted(made, key=lambda line: (-line.budget, -(line.score or 0))):
        if line.task == ALL:
            kl = "" if line.kld_change is None else "{:+.3g} to {:+.3g}".format(*line.kld_change)
            change = "" if line.score_change is None else between(*line.score_change)
            rows.append([f"`{line.method}`", f"{line.budget:g}", f"{100 * line.score:.1f}", change,
                         f"{100 * line.top1:.1f}", f"{line.kld or 0:.3g}", kl])  # fmt: skip
    return markdown(rows)


def short(made: list) -> str:
    """Returns percent of exact answers / of the full cache's likeliest tokens: a row a method, a column a budget."""
    lines = {(line.method, line.budget): line for line in made if line.task == ALL}
    budgets = sorted({budget for name, budget in lines if name != FULL}, reverse=True)
    total = {name: 0.0 for name, _ in lines}
    for (name, _), line in lines.items():
        total[name] += line.score * (len(budgets) if name == FULL else 1)
    rows = [["method", *(f"{budget:g}" for budget in budgets)]]
    for name in sorted(total, key=lambda name: -total[name]):
        found = [lines.get((name, 1.0 if name == FULL else budget)) for budget in budgets]
        rows.append([f"`{name}`", *(f"{100 * one.score:.0f}/{100 * one.top1:.0f}" if one else "" for one in found)])
    return markdown(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--method", default="all", help="one or several, with commas (default: every one)")
    parser.add_argument("--plan", type=Path, action="append", default=[], metavar="FILE.json", help="repeatable")
    parser.add_argument("--budget", default="0.5,0.2,0.1,0.05")
    parser.add_argument("--contexts", type=int, default=400, help="at most (default %(default)s)")
    parser.add_argument("--against", default=FULL, help="what intervals are against (default: the full cache)")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=DATA / "pages-model.gguf")
    parser.add_argument("--mmproj", type=Path, default=DATA / "pages-mmproj.gguf")
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    cells, stop = cells_of(args), threading.Event()
    contexts = [context(args.seed, n) for n in range(args.contexts)]
    options = MeasureOptions(compress=WAYS[args.way])
    job = Job(args.model, args.mmproj, [one for of in contexts for one in of], cells, options,
              Settings(threads=args.threads))  # fmt: skip
    records = Records(args.save, job.header(), args.save is not None and args.save.exists())
    if args.minutes:
        timer = threading.Timer(60 * args.minutes, stop.set)
        timer.daemon = True
        timer.start()
        for line in evaluate(job, records, cancel=stop).left_out[:5]:
            log(line)
    whole = [one for of in contexts for one in of if not any(lacking(s, full_cell(), cells, records) for s in of)]
    made = lines(records.rows, whole, [full_cell(), *cells], args.against)
    print(f"{len(whole)} questions, {len({one.context for one in whole})} contexts")
    print(f"\n{short(made)}")
    for turn, name in enumerate(("first", "second")):
        some = [one for one in whole if int(one.context.rpartition(":")[2]) % 2 == turn]
        print(f"\n{name} questions ({len(some)}):\n\n{short(lines(records.rows, some, [full_cell(), *cells]))}")
    print(f"\n{table(made, args.against)}")
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in made]) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KvedgeError as error:
        sys.exit(f"error: {error}")
