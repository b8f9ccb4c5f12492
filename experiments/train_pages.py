"""Train the second model, which reads pages, from scratch, measure it, and write its GGUF files: one command.

    python experiments/train_pages.py OUT --workers 2

Needs torch, numpy, pillow, gguf and tokenizers. Progress goes to stderr and to OUT/train.log; the accuracies (percent
exact on held-out pages) to stdout as JSON. A second start with the same OUT continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import scriptpath  # noqa: F401
import torch
import torch.distributed as dist
from demo.checkpoint import Log, load_learner
from demo.workers import in_workers, parser_of
from pages.convert import convert
from pages.evaluate import accuracy
from pages.train_text import Plan, load_tower, make_learner, train_text
from pages.train_vision import train_vision


def train(args: argparse.Namespace) -> None:
    train_vision(args.out, args.vision_steps, 800, args.seed, args.rank)
    if args.workers > 1:
        dist.barrier()  # the tower must be complete before another process reads it
    train_text(args.out, Plan(args.text_steps, seed=args.seed), args.rank)


def main() -> int:
    args = parser_of(__doc__, 1200, 1000, 100).parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    in_workers(args, lambda: train(args))
    if args.rank > 0:
        return 0
    log = Log(args.out / "train.log")
    for kind in ("q8_0", "f16"):
        for path in convert(args.out, args.out, kind, args.seed):
            log(f"wrote {path.name}: {path.stat().st_size} bytes")
    tower = load_tower(args.out)
    table = accuracy(load_learner(args.out, make_learner(args.seed, tower)), tower, args.samples)
    log(json.dumps(table))
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
