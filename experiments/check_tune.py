"""How often what kvedge tune states holds: runs with other seeds, against many scenes that no run has seen.

    nice -n 10 python3 scripts/dev.py python experiments/check_tune.py --runs 20 --minutes 3 --truth 400 --folder check

Each run is a `kvedge tune` of its own, on scenes of its seed, in a folder of its own; one that is there is not
repeated. Then every plan that a run proved is measured on other scenes, and compared with the intervals that the runs
stated: of the plan that was taken, and of all finalists. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import scriptpath  # noqa: F401
from llama_source import log

import pykvedge
from kvedge_lab.eval.measure import Cell
from kvedge_lab.progress import Steps
from kvedge_lab.tune import figures, material
from kvedge_lab.tune.race import Kept, Race
from pykvedge.plans.making import default_plan, plan
from pykvedge.runtime.settings import Settings

TRUTH_SEED = 10**6


def stated(args: argparse.Namespace, seed: int) -> dict | None:
    """The certificate of a run; None: it promised nothing."""
    home = args.folder / str(seed)
    done = home / "done.json"
    if not done.exists():
        home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pykvedge", "tune", "--seed", str(seed), "--minutes", str(args.minutes),
                   "--target", str(args.target), "--threads", "1", "--json", "--quiet", *args.more]  # fmt: skip
        out = subprocess.run(command, env={**os.environ, "XDG_CONFIG_HOME": str(home)}, capture_output=True, text=True)
        if out.returncode not in (0, 1):
            sys.exit(f"error: seed {seed}: {out.stderr}")
        done.write_text(out.stdout or "null")
    return json.loads(done.read_text())


def truth(args: argparse.Namespace, keys: set[tuple[str, str]]) -> dict[tuple[str, str], figures.Figures]:
    """The agreement of plans on scenes that no run has seen."""
    cells = [Cell(name, plan(name, budget)) for name, budget in sorted(keys)]
    usual = Cell("kvedge", default_plan())
    drawn = material.scenes(TRUTH_SEED, [])
    of = material.Material(drawn.source, itertools.islice(drawn.contexts, args.truth), size=args.truth)
    kept = Kept(args.folder / "truth.jsonl", {"of": "truth"})
    with pykvedge.load(threads=1) as loaded:
        run = Race(loaded.lend(), Settings(threads=1), of, cells, usual, args.target, 1e9, kept,
                   Steps(enabled=False), threading.Event())  # fmt: skip
        run.measure_all()
        return figures.figures(cells, kept.rows, run.contexts, {"top1": 1.0, "exact": 1.0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--target", type=float, default=0.99)
    parser.add_argument("--truth", type=int, default=400, help="contexts")
    parser.add_argument("--folder", type=Path, default=Path("check-tune"))
    parser.add_argument("more", nargs="*", help="more options of kvedge tune, behind --")
    args = parser.parse_args()
    runs = {}
    for seed in range(args.runs):
        runs[seed] = stated(args, seed)
        log(f"seed {seed}: {says(runs[seed])}")
    proved = [(one, of) for one in runs.values() if one for of in one["finalists"]]
    true = truth(args, {(of["method"], str(of["budget"])) for _, of in proved})

    def holds(of: dict) -> bool:
        return of["low"] <= true[of["method"], str(of["budget"])].agreement <= of["high"]

    taken = [one["proof"] for one in runs.values() if one and one["met"]]
    shown = [of for _, of in proved]
    worse = sum(_worse(one, true) for one in runs.values() if one and one["met"])
    print(json.dumps({
        "runs": len(runs), "promised": len(taken), "taken holds": sum(map(holds, taken)),
        "taken reaches the target": sum(true[of["method"], str(of["budget"])].agreement >= args.target for of in taken),
        "finalists": len(shown), "finalists hold": sum(map(holds, shown)), "worse than the default in both": worse,
        "taken": sorted(f"{of['method']} {of['budget']}" for of in taken),
        "truth": {f"{name} {budget}": [one.agreement, one.low, one.high, one.bytes, one.contexts]
                  for (name, budget), one in true.items()},
    }, indent=1))  # fmt: skip


def _worse(one: dict, true: dict[tuple[str, str], figures.Figures]) -> bool:
    of, usual = one["proof"], true["kvedge", str(default_plan().budget.value)]
    mine = true[of["method"], str(of["budget"])]
    return mine.key != usual.key and mine.bytes >= usual.bytes and mine.agreement <= usual.agreement


def says(one: dict | None) -> str:
    if one is None:
        return "nothing is promised"
    of = one["proof"]
    between = f"{of['agreement']:.4f} ({of['low']:.4f} to {of['high']:.4f}, {of['contexts']} contexts)"
    return f"{of['method']} {of['budget']}: {between}, met {one['met']}"


if __name__ == "__main__":
    main()
