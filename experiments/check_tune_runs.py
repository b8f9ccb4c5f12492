"""Runs `kvedge tune` with several seeds, and tests the statements of each run on the contexts of the other runs.

    nice -n 10 python3 scripts/dev.py python experiments/check_tune_runs.py --runs 20 --minutes 2 --save tunes

Each run is the command itself, in a separate folder under --save, so that it finds no certificate or profile of another
run. The truth of a plan is its mean agreement over the contexts of all other runs, which had other scenes. Prints a row
for each run, and one JSON object: how many runs took a plan, in how many of these the stated interval contains the
truth, and how many took a plan worse than the default in both bytes and agreement. The same command continues an
interrupted run; options after -- go to `kvedge tune`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import scriptpath  # noqa: F401
from llama_source import log

from pykvedge.cli.tables import markdown
from pykvedge.plans.making import default_plan

MOST = 1.2  # factor of --minutes; the program's start comes on top
START_S = 60


def run(folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the certificate of a run; {} if the run promised nothing."""
    out = folder / f"{seed}.json"
    if not out.is_file():
        home = folder / f"home-{seed}"
        home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pykvedge", "tune", "--minutes", str(args.minutes), "--threads", "1",
                   "--seed", str(seed), "--json", "--quiet", *args.options]  # fmt: skip
        done = subprocess.run(command, env={**os.environ, "XDG_CONFIG_HOME": str(home)}, capture_output=True, text=True,
                              timeout=60 * MOST * args.minutes + START_S, check=False)  # fmt: skip
        if done.returncode not in (0, 1):
            sys.exit(f"error: seed {seed}: {done.stderr.strip()}")
        log(f"seed {seed}: {done.stderr.strip()}")
        out.write_text(done.stdout or "{}")
    return dict(json.loads(out.read_text()))


def key(of: dict[str, Any]) -> tuple[str, str]:
    return of["method"], str(of["budget"])


def truth(plan: tuple[str, str], others: list[dict[str, Any]]) -> tuple[float, float, int]:
    """Returns the mean agreement and bytes of a plan over the contexts of other runs, and the number of contexts."""
    seen = [one for says in others for one in [*says["finalists"], *says["choosing"]] if key(one) == plan]
    n = sum(one["contexts"] for one in seen)
    means = [sum(one[what] * one["contexts"] for one in seen) / max(n, 1) for what in ("agreement", "bytes")]
    return means[0], means[1], n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1000, help="of the first run")
    parser.add_argument("--save", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS")
    args = parser.parse_args()
    found = {seed: run(args.save, seed, args) for seed in range(args.seed, args.seed + args.runs)}
    told = {seed: says for seed, says in found.items() if says}
    usual = default_plan()
    default = usual.method, str(usual.budget.value)
    rows = [["seed", "plan", "stated", "in others", "contexts", "interval holds"]]
    counts = dict.fromkeys(("runs", "took a plan", "interval holds", "worse in both", "late"), 0)
    counts["runs"] = len(found)
    for seed, says in told.items():
        others, proof = [one for number, one in told.items() if number != seed], says["proof"]
        plan = key(proof) if says["met"] else ("full", "1")
        counts["late"] += says["made"]["seconds"] > 60 * MOST * args.minutes
        agreement, size, n = truth(plan, others)
        holds = n > 0 and proof["low"] <= agreement <= proof["high"]
        if says["met"]:
            usually, usual_size, _ = truth(default, others)
            counts["took a plan"] += 1
            counts["interval holds"] += holds
            counts["worse in both"] += agreement < usually and size > usual_size
        stated = "{:.1f} % ({:.1f} to {:.1f})".format(*(100 * proof[k] for k in ("agreement", "low", "high")))
        rows.append([str(seed), " ".join(plan), stated if says["met"] else "", f"{100 * agreement:.2f} %" if n else "",
                     str(n), ("yes" if holds else "no") if says["met"] else ""])  # fmt: skip
    print(markdown(rows))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
