"""Accuracy of the PyTorch model on held-out samples.

Greedy decoding gives exactly the reference if and only if, with the reference as input, the most likely token is right
at every position. So one forward pass for each sample measures exact match without generating.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from kvedge_lab.demo_tasks.evalset import Sample, chain, samples
from kvedge_lab.demo_tasks.scenes import Scene
from kvedge_lab.demo_tasks.tasks import NEEDLE_TASKS, TASKS, Question

from .rows import IGNORE, Batch, Row, RowMaker, Style, collate
from .tokenizer import EOS
from .train_text import Learner, image_features
from .vision import N_PATCHES, VisionTower

CHAINS = (
    ("code", "where"),
    ("where", "code"),
    ("colour", "where", "describe"),
    ("which-image", "code-in-image-k"),
    ("code-in-image-k", "which-image", "code-in-image-k"),
)


def sample_row(maker: RowMaker, sample: Sample) -> Row:
    row, at = maker.images(None, list(sample.scenes), N_PATCHES)
    maker.ask(row, at, 1, sample.question, Style(int(sample.second_turn), sample.second_turn, False))
    return row


def chain_row(maker: RowMaker, scenes: tuple[Scene, ...], questions: list[Question]) -> Row:
    """Returns the row of a chain: the last question after the others and their answers. Only the last is judged."""
    row, at = maker.images(None, list(scenes), N_PATCHES)
    for n, question in enumerate(questions):
        row.targets = [IGNORE] * len(row.targets)
        at = maker.ask(row, at, 1, question, Style(2 if n else 0, False, False))
    return row


def states(learner: Learner, batch: Batch, features: Tensor) -> Tensor:
    """Returns the last hidden states, [rows, tokens, width]."""
    x, table = learner.embed(batch, features), learner.text.table(batch.positions)
    for block in learner.text.blocks:
        x, _, _ = block(x, table, batch.mask)
    return learner.text.norm(x)


@torch.no_grad()
def exact(learner: Learner, tower: VisionTower, rows: list[Row]) -> list[bool]:
    """Returns whether each row's answer would be generated exactly."""
    batch = collate(rows, torch.float32)
    x = states(learner, batch, image_features(tower, batch))
    learnt = batch.targets != IGNORE
    right = torch.ones_like(learnt)
    right[learnt] = learner.text.head(x[learnt]).argmax(-1) == batch.targets[learnt]
    return right.all(-1).tolist()


@torch.no_grad()
def generate(learner: Learner, tower: VisionTower, sample: Sample, limit: int = 100) -> str:
    """Returns the greedy answer. Computes the whole row again for each token."""
    row = sample_row(RowMaker(learner.tokenizer), sample)
    # Remove the reference answer: the row ends where its first token is predicted.
    start = next(t for t, cells in enumerate(row.sources) if cells)
    for name in ("ids", "positions", "branch", "targets", "sources"):
        del getattr(row, name)[start + 1 :]
    row.sources[start] = ()
    features = image_features(tower, collate([row]))
    answer: list[int] = []
    while len(answer) < limit:
        batch = collate([row], torch.float32)
        token = int(learner.text.head(states(learner, batch, features)[0, -1]).argmax())
        if token == EOS:
            break
        answer.append(token)
        row.add([token], row.positions[-1] + 1, 1)
    return learner.tokenizer.decode(answer)


def accuracy(learner: Learner, tower: VisionTower, count: int, images: int, seed: int = 0) -> dict[str, float]:
    """Returns percent exact, per task and turn, and of the last question of CHAINS. images: of the needle tasks."""
    maker = RowMaker(learner.tokenizer)
    table: dict[str, float] = {}
    for task, second in itertools.product(TASKS, (False, True)):
        rows = (sample_row(maker, s) for s in samples(task, seed, images, second))
        size = images if task in NEEDLE_TASKS else 1
        table[task + (" (turn 2)" if second else "")] = percent(learner, tower, itertools.islice(rows, count), size)
    for tasks in CHAINS:
        rows = (chain_row(maker, *drawn) for drawn in chain(tasks, seed, images))
        size = images if tasks[0] in NEEDLE_TASKS else 1
        table["+".join(tasks)] = percent(learner, tower, itertools.islice(rows, count), size)
    return table


def percent(learner: Learner, tower: VisionTower, rows: Iterator[Row], size: int) -> float:
    """Returns the percent of rows whose answer would be generated exactly. size: images of each row."""
    results: list[bool] = []
    while part := list(itertools.islice(rows, max(1, 32 // size))):
        results += exact(learner, tower, part)
    return 100 * sum(results) / len(results)
