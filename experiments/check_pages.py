"""Compare the GGUF files of the second model with the PyTorch model that they were made from, on held-out pages.

    python experiments/check_pages.py MODEL MMPROJ OUT --samples 5

OUT is a folder of train_pages.py. Prints JSON for each task: whether the prompts have the same tokens, the percent of
answer tokens that both find the most likely, and the largest difference of a logit. `kvedge eval --method full --tasks
pages` measures how many answers are right.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import scriptpath  # noqa: F401

from kvedge_lab.eval.measure import Preparer
from kvedge_lab.eval.reader import Reader
from kvedge_lab.eval.runner import borrow, full_cell
from kvedge_lab.eval.tasks import PAGES, Sample, page_samples
from kvedge_lab.page_tasks import evalset
from kvedge_lab.page_tasks.tasks import TASKS
from kvedge_lab.progress import Steps
from pykvedge.models.vision import ImagePiece, Vision
from pykvedge.runtime.settings import Settings


class Stored:
    """Reads samples with the GGUF files and the full cache."""

    def __init__(self, model: Path, mmproj: Path) -> None:
        settings = Settings.of({"verbose": False})
        self.loan = borrow(model, mmproj, settings, Steps(enabled=False), threading.Event())
        vision = Vision(self.loan.encoder)
        self.reader = Reader(self.loan.model, vision, self.loan.threads, settings.storage)
        self.preparer = Preparer(self.loan.model, vision)

    def read(self, sample: Sample) -> tuple[list[int], np.ndarray]:
        """Returns the tokens (-1 for an image's), and the logits of each token of the answer and of its end."""
        prepared, ids, logits = self.preparer.prepare(sample), list[int](), []
        self.reader.make_room(prepared.n_conversation, len(prepared.answer), max(prepared.images))
        self.reader.start(full_cell().plan)
        for number, (pieces, reply) in enumerate(prepared.turns, 1):
            self.reader.read(pieces)
            for piece in pieces:
                ids += [-1] * piece.n_tokens if isinstance(piece, ImagePiece) else piece.tokens
            for token in reply if number < len(prepared.turns) else ():
                self.reader.extend(token)
                ids.append(token)
        for token in prepared.answer:
            logits.append(self.reader.logits().copy())
            self.reader.extend(token)
        logits.append(self.reader.logits().copy())
        self.preparer.release(prepared.turns)
        return ids + prepared.answer, np.stack(logits)

    def close(self) -> None:
        self.reader.close()
        self.loan.give_back()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("mmproj", type=Path)
    parser.add_argument("out", type=Path, help="folder of the PyTorch checkpoints")
    parser.add_argument("--samples", type=int, default=5, help="of each task and turn (default %(default)s)")
    parser.add_argument("--pages", type=int, default=3, help="of each sample (default %(default)s)")
    args = parser.parse_args()
    from demo.checkpoint import load_learner
    from pages.evaluate import logits, sample_row
    from pages.train_text import load_tower, make_learner

    tower, stored = load_tower(args.out), Stored(args.model, args.mmproj)
    learner = load_learner(args.out, make_learner(1, tower))
    table = {}
    for task in TASKS:
        tokens, best, largest = True, [], 0.0
        for turn, end in enumerate(("", "/2")):
            asked = page_samples(f"{PAGES}{task}{end}", args.samples, 0, args.pages)
            for sample, of in zip(asked, islice(evalset.samples(task, 0, args.pages), args.samples), strict=True):
                ids, theirs = stored.read(sample)
                row = sample_row(tower, of, turn)
                ours = logits(learner, row)
                tokens = tokens and ids[: len(row.ids)] == row.ids
                best += (ours.argmax(-1) == theirs[: len(ours)].argmax(-1)).tolist()
                largest = max(largest, float(np.abs(ours - theirs[: len(ours)]).max()))
        table[task] = {"same_tokens": tokens, "same_best": 100 * float(np.mean(best)), "largest": round(largest, 4)}
    stored.close()
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
