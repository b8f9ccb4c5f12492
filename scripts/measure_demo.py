"""What compression costs the demo model: exact answers by method, budget and task, on held-out samples, greedily.

    python3 scripts/dev.py python scripts/measure_demo.py --samples 50

Each sample goes through a kvedge session, as in `kvedge chat`. A task "in turn 2" shows the images in a first turn,
whose prompt is compressed before the question is known.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pykvedge
from pykvedge.demo_tasks.evalset import Sample, samples
from pykvedge.demo_tasks.prompts import show_text
from pykvedge.images import Picture

DATA = Path(pykvedge.__file__).resolve().parent / "data"
TASKS = ("code", "describe", "where", "which-image", "code-in-image-k", "difference")
METHODS = ("streaming-llm", "h2o", "lookm", "snapkv", "random")
BUDGETS = (0.5, 0.2, 0.1, 0.05)


def pictures(sample: Sample) -> list[Picture]:
    return [Picture(f"scene {i}", x.shape[1], x.shape[0], x.tobytes()) for i, x in enumerate(sample.images())]


def answer(session: pykvedge.Session, sample: Sample) -> str:
    session.clear()
    shown = pictures(sample)
    if sample.second_turn:
        session.ask(show_text(len(shown)), shown).read()
        shown = []
    return session.ask(sample.question.text, shown).read().strip()


def measure(session: pykvedge.Session, plan: pykvedge.Plan, chosen: dict[str, list[Sample]]) -> dict[str, float]:
    """Percent of exact answers per task."""
    session.clear()
    session.set_plan(plan)
    return {
        name: 100 * sum(answer(session, s) == s.answer for s in drawn) / len(drawn) for name, drawn in chosen.items()
    }


def draw(tasks: list[str], count: int, images: int) -> dict[str, list[Sample]]:
    table = {}
    for second, task in itertools.product((False, True), tasks):
        name = task + (" in turn 2" if second else "")
        table[name] = list(itertools.islice(samples(task, 7, images, second), count))
    return table


def show(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["exact"])
    lines = [["method", "budget", *names]]
    lines += [[r["method"], f"{r['budget']:g}", *(f"{r['exact'][n]:.0f}" for n in names)] for r in rows]
    print("| " + " | ".join(lines[0]) + " |")
    print("| " + " | ".join("---" for _ in lines[0]) + " |")
    for line in lines[1:]:
        print("| " + " | ".join(line) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50, help="of each task (default %(default)s)")
    parser.add_argument("--images", type=int, default=4, help="of the needle tasks (default %(default)s)")
    parser.add_argument("--method", action="append", default=[], help="repeatable")
    parser.add_argument("--budget", action="append", default=[], type=float, help="repeatable")
    parser.add_argument("--task", action="append", default=[], choices=TASKS, help="repeatable")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a Markdown table")
    args = parser.parse_args()
    chosen = draw(args.task or list(TASKS), args.samples, args.images)
    cells = [("full", 1.0), *itertools.product(args.method or METHODS, args.budget or BUDGETS)]
    rows = []
    with pykvedge.Session(DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf", threads=args.threads) as session:
        for i, (method, budget) in enumerate(cells):
            print(f"{i + 1} of {len(cells)}: {method} {budget:g}", file=sys.stderr, flush=True)
            plan = pykvedge.plan(method) if method == "full" else pykvedge.plan(method, budget)
            rows.append({"method": method, "budget": budget, "exact": measure(session, plan, chosen)})
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
