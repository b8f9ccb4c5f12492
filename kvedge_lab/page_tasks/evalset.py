"""Evaluation sets of pages: seeded, endless, of the held-out side only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .pages import MAX_PAGES, Page, draw_page
from .tasks import ASKERS, KIND_OF, TASKS, Question


@dataclass(frozen=True)
class PageSample:
    """A question about a document of one or several pages. `question.answer` is the reference."""

    pages: tuple[Page, ...]
    question: Question


def draw_sample(rng: np.random.Generator, task: str, count: int, held_out: bool = True) -> PageSample:
    """Draws `count` pages and a question about one of them. Raises ValueError for an unknown task or a wrong count."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    if not (2 if task == "which-page" else 1) <= count <= MAX_PAGES:
        raise ValueError(f"task {task} does not support {count} pages")
    while True:
        k = int(rng.integers(0, count))
        pages = tuple(draw_page(rng, held_out, KIND_OF.get(task, "") if n == k else "") for n in range(count))
        question = ASKERS[task](rng, pages, k)
        if question is not None:
            return PageSample(pages, question)


def samples(task: str, seed: int = 0, count: int = 1) -> Iterator[PageSample]:
    """Yields endless held-out samples. Sample n does not depend on the samples before it."""
    for number in itertools.count():
        yield draw_sample(np.random.default_rng((seed, TASKS.index(task), count, number)), task, count)
