"""Training rows of the text model: the pages once, then several questions that see the pages but not each other.

Some questions follow another question and its answer, as a conversation goes on: these see both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from demo.rows import IGNORE
from torch import Tensor

from kvedge_lab.demo_tasks.prompts import MEDIA, SHOW_ANSWER, image_text, show_text
from kvedge_lab.page_tasks.pages import COLUMNS, Page
from kvedge_lab.page_tasks.tasks import ASKERS, Question

from .tokenizer import END, SEEN, SEEN_END, START, encode, spans
from .vision import TARGETS

ASSISTANT = f"{END}\n{START}assistant\n"
FOLLOWS, SECOND_TURN = 0.25, 0.3
# Labels that an answer's position cannot tell before its source is found, by task. The page is the last label.
FOUND_LAST = {"longest": ("key",), "which-line": ("key",), "which-page": ("page", "slot")}
LABELS = tuple(TARGETS)


@dataclass(frozen=True)
class Encoded:
    """A page encoded by the tower: features [cells, width], and the targets of its cells."""

    page: Page
    features: Tensor
    labels: np.ndarray


@dataclass
class Row:
    """Per token: id (-1: a page's cell), position, branch (0: visible to all), target, and the source cell."""

    pages: Sequence[Encoded]
    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    sources: list[tuple[int, int] | None] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    cells: list[tuple[int, int]] = field(default_factory=list)  # (page, cell) of each id -1

    def add(self, tokens: list[int], at: int, branch: int, task: str = "") -> int:
        """Adds text. Returns the next position."""
        self.ids += tokens
        self.positions += [(p, p, p) for p in range(at, at + len(tokens))]
        self.branch += [branch] * len(tokens)
        self.targets += [IGNORE] * len(tokens)
        self.sources += [None] * len(tokens)
        self.tasks += [task] * len(tokens)
        return at + len(tokens)

    def add_page(self, k: int, cells: np.ndarray, at: int) -> int:
        """Adds cells of page k; left-out cells keep their positions free. Returns the position after the page."""
        start = len(self.ids)
        self.add([-1] * len(cells), at, 0)
        self.positions[start:] = [(at, at + int(c) // COLUMNS, at + int(c) % COLUMNS) for c in cells]
        self.cells += [(k, int(c)) for c in cells]
        return at + max(self.pages[k].page.height, COLUMNS)


def page_row(pages: Sequence[Encoded], rng: np.random.Generator | None = None, plain: int = 0) -> tuple[Row, int]:
    """Returns the row up to its last page, and the next position.

    rng: draws `plain` empty cells of each page, and leaves out the others; None: all cells are included.
    """
    row, at = Row(pages), 0
    for k, text in enumerate(f"{START}user\n{image_text(len(pages), 'page')}".split(MEDIA)[:-1]):
        at = row.add(encode((SEEN_END if k else "") + text + SEEN), at, 0)
        shown = pages[k].labels.any(-1)
        cells = np.arange(len(shown))
        if rng is not None:
            empty = np.flatnonzero(~shown)
            drawn = rng.choice(empty, min(plain, len(empty)), replace=False)
            cells = np.sort(np.concatenate([np.flatnonzero(shown), drawn]))
        at = row.add_page(k, cells, at)
    return row, row.add(encode(SEEN_END), at, 0)


def ask(row: Row, at: int, branch: int, question: Question, turn: int) -> int:
    """Adds a question with its answer at position `at`. Returns the next position.

    turn: 0 with the pages, 1 after a turn that only shows them, 2 after another question and its answer.
    """
    shown = f"\n{show_text(len(row.pages), 'page')}{ASSISTANT}{SHOW_ANSWER}"
    before = ("\n", f"{shown}{END}\n{START}user\n", f"{END}\n{START}user\n")[turn]
    prompt = encode(f"{before}{question.text}{ASSISTANT}")
    answer = [*encode(question.answer), encode(END)[0]]
    at = row.add(prompt + answer[:-1], at, branch, question.task)
    first = len(row.ids) - len(answer)
    row.targets[first:] = answer
    for j, (start, stop) in enumerate(spans(question.answer)):
        source = next((s for s in question.sources[start:stop] if s is not None), None)
        if source is not None:
            row.sources[first + j] = (source[0], source[1] * COLUMNS + source[2])
    if turn == 1:
        known = len(row.ids) - len(answer) + 1 - len(prompt) + len(encode(shown.removesuffix(SHOW_ANSWER)))
        row.targets[known - 1 : known + 1] = [encode(SHOW_ANSWER)[0], answer[-1]]
    return at


def draw_questions(rng: np.random.Generator, pages: Sequence[Page], amount: int) -> list[Question]:
    """Draws questions about the pages, with all tasks about equally often."""
    found: dict[str, Question] = {}
    for _ in range(40 * amount):
        ask_one = ASKERS[list(ASKERS)[int(rng.integers(0, len(ASKERS)))]]
        question = ask_one(rng, pages, int(rng.integers(0, len(pages))))
        if question is not None:
            found[question.text] = question
        if len(found) == amount:
            break
    return list(found.values())


def draw_row(rng: np.random.Generator, pages: Sequence[Encoded], plain: int, amount: int = 8) -> Row:
    """Returns a row of pages and questions. plain: number of empty cells to include; -1: all."""
    row, at = page_row(pages, None if plain < 0 else rng, plain)
    branch, place = 0, at
    for n, question in enumerate(draw_questions(rng, [one.page for one in pages], amount)):
        follows = n > 0 and rng.random() < FOLLOWS
        branch, start = (branch, place) if follows else (branch + 1, at)
        place = ask(row, start, branch, question, 2 if follows else int(rng.random() < SECOND_TURN))
    return row


def of_page(labels: np.ndarray, k: int) -> np.ndarray:
    labels = labels.copy()
    labels[..., LABELS.index("page")] = k + 1
    return labels


@dataclass
class Batch:
    ids: Tensor  # [rows, tokens], -1 for cells
    positions: Tensor  # [rows, tokens, 3]
    mask: Tensor  # additive, [rows, 1, tokens, tokens]
    targets: Tensor
    cell_at: Tensor  # [cells, 2]: row, token
    features: Tensor  # [cells, width]
    labels: Tensor  # [cells, len(LABELS)]
    source_at: Tensor  # [sources, 2]: row, token
    source_token: Tensor  # [sources, 1]
    source_labels: Tensor  # [sources, len(LABELS)], IGNORE where it cannot be known yet


def collate(rows: Sequence[Row], dtype: torch.dtype = torch.bfloat16) -> Batch:
    size = max(len(row.ids) for row in rows)

    def padded(name: str, fill: object) -> Tensor:
        return torch.tensor([getattr(row, name) + [fill] * (size - len(row.ids)) for row in rows])

    branch = padded("branch", -1)
    seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    seen &= torch.ones(size, size, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -1e4).unsqueeze(1)
    cell_at, features, labels, source_at, source_token, source_labels = [], [], [], [], [], []
    for b, row in enumerate(rows):
        tokens = [t for t, i in enumerate(row.ids) if i < 0]
        where = dict(zip(row.cells, tokens, strict=True))
        cell_at += [(b, t) for t in tokens]
        for k, one in enumerate(row.pages):
            cells = [c for of, c in row.cells if of == k]
            features.append(one.features[cells])
            labels.append(of_page(one.labels[cells], k))
        for t, source in enumerate(row.sources):
            if source is not None:
                told = of_page(row.pages[source[0]].labels[source[1]], source[0])
                told[[LABELS.index(name) for name in FOUND_LAST.get(row.tasks[t], ())]] = IGNORE
                source_at.append((b, t))
                source_token.append([where[source]])
                source_labels.append(told)
    arrays = (torch.from_numpy(np.concatenate(labels)), torch.tensor(source_at), torch.tensor(source_token),
              torch.from_numpy(np.stack(source_labels)))  # fmt: skip
    positions = padded("positions", (0, 0, 0))
    return Batch(padded("ids", 0), positions, mask, padded("targets", IGNORE), torch.tensor(cell_at),
                 torch.cat(features), *arrays)  # fmt: skip
