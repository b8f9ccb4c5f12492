"""Train the demo model from scratch, measure it, and write its GGUF files: one command.

    python experiments/train_demo.py OUT --workers 2

Needs torch, numpy, pillow and gguf. Progress goes to stderr and to OUT/train.log; the accuracies (percent exact on
held-out samples) to stdout as JSON. A second start with the same OUT continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from demo.checkpoint import Log, load_learner
from demo.convert import convert
from demo.evaluate import accuracy
from demo.train_text import Plan, load_tower, make_learner, train_text
from demo.train_vision import train_vision
from demo.workers import in_workers, parser_of


def text_phase(args: argparse.Namespace) -> None:
    plan = Plan(args.text_steps, seed=args.seed)
    in_workers(args, lambda: train_text(args.out, plan, args.rank))


def main() -> int:
    parser = parser_of(__doc__, 4000, 1200, 200)
    parser.add_argument("--images", type=int, default=4, help="images per needle sample")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank > 0:
        text_phase(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "train.log")
    train_vision(args.out, args.vision_steps, 32, args.seed, log)
    text_phase(args)
    for kind in ("q8_0", "f16"):
        for path in convert(args.out, args.out, kind, args.seed):
            log(f"wrote {path.name}: {path.stat().st_size} bytes")
    tower = load_tower(args.out)
    learner = load_learner(args.out, make_learner(args.seed, tower))
    table = accuracy(learner, tower, args.samples, args.images)
    log(json.dumps(table))
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
