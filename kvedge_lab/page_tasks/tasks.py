"""Questions about pages, with reference answers.

Each `ask_*` returns a question about page k of a document, or None if no unambiguous question is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .pages import MAX_PAGES, Page, Row, Text

Cell = tuple[int, int, int]  # page, row and column


@dataclass(frozen=True)
class Question:
    """`sources`: the cell where each character of the answer becomes known; None: not read from a page."""

    task: str
    text: str
    answer: str
    sources: tuple[Cell | None, ...]


QUESTIONS = {
    "line": "What does line {} say",
    "which-line": "Which line has the word {}",
    "price": "What is the price of {}",
    "left": "How many {} are left",
    "colour": "What colour is the bar of {}",
    "longest": "Which bar is the longest",
    "code": "What is the code",
    "which-page": "Which page has {}",
}
ON_PAGE = " on page {}"
Asker = Callable[[np.random.Generator, Sequence[Page], int], "Question | None"]


def _text(task: str, pages: Sequence[Page], k: int, about: str = "") -> str:
    """Returns the question. It names page k unless there is only one page."""
    on = "" if len(pages) == 1 or task == "which-page" else ON_PAGE.format(k + 1)
    return f"{QUESTIONS[task].format(about)}{on}?"


def _cells(k: int, text: Text) -> list[Cell | None]:
    return [(k, row, column) for row, column in text.cells()]


def _pick(rng: np.random.Generator, page: Page, kind: str) -> Row | None:
    return page.rows[int(rng.integers(0, len(page.rows)))] if page.kind == kind else None


def _row_question(task: str, kind: str) -> Asker:
    """Returns the asker for one column of a row."""

    def ask(rng: np.random.Generator, pages: Sequence[Page], k: int) -> Question | None:
        row = _pick(rng, pages[k], kind)
        if row is None:
            return None
        part = row.part(task)
        return Question(task, _text(task, pages, k, row.key.text), part.text, tuple(_cells(k, part)))

    return ask


def ask_line(rng: np.random.Generator, pages: Sequence[Page], k: int) -> Question | None:
    row = _pick(rng, pages[k], "text")
    if row is None:
        return None
    words, sources = row.parts[1:], list[Cell | None]()
    for word in words:
        sources += [*([None] if sources else []), *_cells(k, word)]
    answer = " ".join(word.text for word in words)
    return Question("line", _text("line", pages, k, row.key.text), answer, tuple(sources))


def ask_which_line(rng: np.random.Generator, pages: Sequence[Page], k: int) -> Question | None:
    row = _pick(rng, pages[k], "text")
    if row is None:
        return None
    word = row.parts[int(rng.integers(1, 4))]
    if sum(part.text == word.text for other in pages[k].rows for part in other.parts) > 1:
        return None
    # the word can be found on the page; there its line's number is known
    return Question("which-line", _text("which-line", pages, k, word.text), row.key.text, tuple(_cells(k, word)[:1]))


def ask_colour(rng: np.random.Generator, pages: Sequence[Page], k: int) -> Question | None:
    row = _pick(rng, pages[k], "chart")
    if row is None or row.bar is None:
        return None
    text = _text("colour", pages, k, row.key.text)
    return Question("colour", text, row.bar.colour, ((k, row.bar.row, row.bar.column),) * len(row.bar.colour))


def ask_longest(rng: np.random.Generator, pages: Sequence[Page], k: int) -> Question | None:
    if pages[k].kind != "chart":
        return None
    row = max(pages[k].rows, key=lambda row: row.bar.length if row.bar else 0)
    return Question("longest", _text("longest", pages, k), row.key.text, tuple(_cells(k, row.key)))


def ask_code(rng: np.random.Generator, pages: Sequence[Page], k: int) -> Question | None:
    return Question("code", _text("code", pages, k), pages[k].code.text, tuple(_cells(k, pages[k].code)))


def ask_which_page(rng: np.random.Generator, pages: Sequence[Page], k: int) -> Question | None:
    """Asks for the page with an item that is on page k alone."""
    row = _pick(rng, pages[k], pages[k].kind)
    if len(pages) == 1 or row is None or pages[k].kind == "text":
        return None
    if sum(other.key.text == row.key.text for page in pages for other in page.rows) > 1:
        return None
    cells = _cells(k, row.key)
    answer = f"page {k + 1}"
    return Question("which-page", _text("which-page", pages, k, row.key.text), answer, (cells[0],) * len(answer))


ASKERS: dict[str, Asker] = {
    "line": ask_line,
    "which-line": ask_which_line,
    "price": _row_question("price", "table"),
    "left": _row_question("left", "table"),
    "colour": ask_colour,
    "longest": ask_longest,
    "code": ask_code,
    "which-page": ask_which_page,
}
KIND_OF = {"line": "text", "which-line": "text", "price": "table", "left": "table", "colour": "chart",
           "longest": "chart"}  # fmt: skip
TASKS = tuple(ASKERS)
assert MAX_PAGES < 10
