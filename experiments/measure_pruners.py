"""Counts right answers when a model reads fewer tokens of each image, by pruner, on plain and textured scenes.

    python3 experiments/measure_pruners.py --samples 50 --texture 0,8,16 --amounts 0.75,0.5,0.25 --json pruners.json

The samples are held-out scenes of the demo model (docs/models.md). A texture of 8 adds waves and grain of up to 8 of
255 to every pixel, so that all patches of the background differ, and pale scraps in a third of the empty cells. `kvedge
eval` reads the scenes. Every pruner keeps the same number of tokens of each image.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from kvedge_lab.demo_tasks.evalset import Sample, samples
from kvedge_lab.demo_tasks.scenes import CELL, GRID, IMAGE_SIZE
from pykvedge import plan
from pykvedge.cli.tables import markdown
from pykvedge.plans.registry import members

TASKS = "colour,shape,count,where,code,which-image,code-in-image-k,difference"
SCRAPS = 1 / 3  # share of the empty cells


def textured(picture: np.ndarray, rng: np.random.Generator, strength: int) -> np.ndarray:
    """Adds waves, grain and scraps of at most `strength` to a picture, uint8 [240, 240, 3]."""
    y, x = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE] / IMAGE_SIZE * 2 * np.pi
    out = picture.astype(np.float64)
    for channel in range(3):
        turns = rng.uniform(-6, 6, (4, 2))
        waves = sum(np.sin(a * y + b * x + rng.uniform(0, 6)) for a, b in turns) / 4
        out[..., channel] += strength * (0.6 * waves + 0.4 * rng.uniform(-1, 1, waves.shape))
    background = picture[0, 0]
    for row, col in np.ndindex(GRID, GRID):
        cell = (slice(row * CELL, row * CELL + CELL), slice(col * CELL, col * CELL + CELL))
        empty = np.abs(picture[cell].astype(int) - background).max() < 8
        if empty and rng.random() < SCRAPS:
            top, left, high, wide = (int(n) for n in rng.integers((2, 2, 3, 3), (10, 10, 9, 9)))
            out[cell][top : top + high, left : left + wide] += strength * rng.choice((-1, 1)) * rng.uniform(0.5, 1, 3)
    return np.clip(np.rint(out), 0, 255).astype(np.uint8)


def write_samples(folder: Path, chosen: list[Sample], strength: int) -> Path:
    """Writes the pictures and a file of samples for `kvedge eval`, one JSON line each."""
    lines = []
    for n, sample in enumerate(chosen):
        files = []
        for k, picture in enumerate(sample.images()):
            files.append(f"{n:04d}-{k}.png")
            rng = np.random.default_rng((strength, n, k))
            Image.fromarray(textured(picture, rng, strength) if strength else picture).save(folder / files[-1])
        line = {"id": f"{n:04d}-{sample.task}", "task": sample.task, "images": files}
        lines.append({**line, "question": sample.question.text, "answer": sample.answer})
        path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_plans(folder: Path, pruners: list[str], amounts: list[str]) -> list[Path]:
    """Writes one plan for each pruner and amount: a full cache of the kept image tokens."""
    out = []
    for pruner in pruners:
        for amount in amounts:
            out.append(folder / f"{pruner}-{amount}.json")
            out[-1].write_text(plan("full", pruner=pruner, image_tokens=amount).to_json())
    return out


def measure(strength: int, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns {variant: {sample: score from 0 to 1}}; variants are "full", "residual-0.5" and so on."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chosen = [
            sample
            for task in given.tasks.split(",")
            for sample in islice(samples(task, given.seed, given.images), given.samples)
        ]
        data = write_samples(folder, chosen, strength)
        plans = write_plans(folder, given.pruners.split(","), given.amounts.split(","))
        saved = folder / "results.jsonl"
        arguments = ["eval", str(data), "--method", "full", "--metrics", "score", "--save", str(saved)]
        arguments += [str(part) for path in plans for part in ("--plan", path)]
        subprocess.run([sys.executable, "-m", "pykvedge", *arguments], stdout=subprocess.DEVNULL, check=True)
        out: dict[str, dict[str, float]] = {}
        for row in map(json.loads, saved.read_text().splitlines()[1:]):
            out.setdefault(row["method"], {})[row["id"]] = row["score"]
        return out


def table(found: dict[str, dict[str, float]], pruners: list[str], amounts: list[str]) -> str:
    """Returns percent of right answers, and half of the 95 % interval of the paired difference to all tokens."""
    whole = np.array([found["full"][name] for name in sorted(found["full"])])

    def cell(variant: str) -> str:
        here = np.array([found[variant][name] for name in sorted(found["full"])])
        by = here - whole
        return f"{100 * here.mean():.1f} ({100 * by.mean():+.1f} ± {196 * by.std(ddof=1) / len(by) ** 0.5:.1f})"

    rows = [[pruner, *(cell(f"{pruner}-{amount}") for amount in amounts)] for pruner in pruners]
    return markdown([["pruner", *amounts], *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=25, help="of each task")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--images", type=int, default=4, help="of the tasks with several")
    parser.add_argument("--texture", default="0,8", help="strengths, 0: plain")
    parser.add_argument("--amounts", default="0.75,0.5,0.25")
    parser.add_argument("--pruners", default=",".join(name for name in members("pruner") if name != "none"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the score of every sample there")
    given = parser.parse_args()
    found = {}
    for strength in map(int, given.texture.split(",")):
        found[strength] = measure(strength, given)
        full = found[strength]["full"].values()
        print(f"\ntexture {strength}: {len(full)} samples, all tokens {100 * sum(full) / len(full):.1f} %\n")
        print(table(found[strength], given.pruners.split(","), given.amounts.split(",")), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
