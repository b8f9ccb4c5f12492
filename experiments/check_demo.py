"""Compare the GGUF files of the demo model with the PyTorch model that they were made from, on held-out samples.

    python experiments/check_demo.py MODEL MMPROJ OUT --samples 50

OUT is a folder of train_demo.py. Prints JSON: for each task, the percent of samples with the same greedy answer of
both. Half of the samples are asked in the second turn. `kvedge eval --method full` measures how many answers are right.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import scriptpath  # noqa: F401

from kvedge_lab.demo_tasks import evalset
from kvedge_lab.demo_tasks.prompts import MEDIA
from kvedge_lab.demo_tasks.tasks import TASKS
from kvedge_lab.eval.measure import MeasureOptions
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import Job, evaluate
from kvedge_lab.eval.tasks import DialogMessage, Sample
from pykvedge.models.prompt import IMAGE


def conversation(sample: evalset.Sample) -> tuple[DialogMessage, ...]:
    """Returns the messages in the trainer's form, with numbered images."""
    texts = [(m["role"], m["content"].replace(MEDIA, IMAGE)) for m in sample.messages()]
    return tuple(DialogMessage(role, text, sample.scenes if i == 0 else ()) for i, (role, text) in enumerate(texts))


def answers(args: argparse.Namespace, chosen: list[evalset.Sample]) -> list[str]:
    """Returns the answers of the GGUF files with the full cache."""
    asked = [Sample(str(i), s.task, conversation(s), s.answer) for i, s in enumerate(chosen)]
    done = evaluate(Job(args.model, args.mmproj, asked, [], MeasureOptions(likelihood=False)), Records(None, {}, False))
    return [row["answer"] for row in done.records.rows.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("mmproj", type=Path)
    parser.add_argument("out", type=Path, help="folder of the PyTorch checkpoints")
    parser.add_argument("--samples", type=int, default=50, help="of each task (default %(default)s)")
    parser.add_argument("--images", type=int, default=4, help="images of the needle tasks (default %(default)s)")
    args = parser.parse_args()
    from demo.checkpoint import load_learner
    from demo.evaluate import generate
    from demo.train_text import load_tower, make_learner

    tower, table = load_tower(args.out), {}
    learner = load_learner(args.out, make_learner(1, tower))
    for task in TASKS:
        turns = [evalset.samples(task, 1, args.images, second) for second in (False, True)]
        chosen = [sample for drawn in turns for sample in islice(drawn, args.samples // 2)]
        same = zip(answers(args, chosen), chosen, strict=True)
        table[task] = 100 * sum(text == generate(learner, tower, s) for text, s in same) / len(chosen)
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
