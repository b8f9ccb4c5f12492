"""Accuracy of the PyTorch model on held-out pages: one forward pass for each sample (see demo/evaluate.py)."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from demo.rows import IGNORE

from kvedge_lab.page_tasks.evalset import PageSample, samples
from kvedge_lab.page_tasks.tasks import TASKS

from .rows import Row, ask, collate, page_row
from .tokenizer import encode
from .train_text import Learner, encode_pages
from .vision import Tower


def sample_row(tower: Tower, sample: PageSample, turn: int = 0) -> Row:
    """Returns the row of a sample, where only the answer is judged. turn: as in `ask`, 0 or 1."""
    row, at = page_row(encode_pages(tower, sample.pages, torch.float32))
    ask(row, at, 1, sample.question, turn)
    before = len(row.ids) - len(encode(sample.question.answer)) - 1
    row.targets[:before] = [IGNORE] * before
    return row


@torch.no_grad()
def logits(learner: Learner, row: Row) -> np.ndarray:
    """Returns the logits at each judged token, [tokens, vocabulary]."""
    batch = collate([row], torch.float32)
    return learner.text.head(learner.states(batch)[batch.targets != IGNORE]).numpy()


def exact(learner: Learner, row: Row) -> bool:
    """Returns whether the row's answer would be generated exactly."""
    return logits(learner, row).argmax(-1).tolist() == [target for target in row.targets if target != IGNORE]


def accuracy(learner: Learner, tower: Tower, count: int, seed: int = 0) -> dict[str, float]:
    """Returns percent exact of each task, about one page and about four."""
    table = {}
    for task, pages in itertools.product(TASKS, (1, 4)):
        if pages == 1 and task == "which-page":
            continue
        drawn = itertools.islice(samples(task, seed, pages), count)
        right = [exact(learner, sample_row(tower, sample)) for sample in drawn]
        table[f"{task}, pages: {pages}"] = round(100 * sum(right) / count, 1)
    return table
