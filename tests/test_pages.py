"""The pages of the second model: seeded, held out, drawn as their data say, and asked about with right answers."""

import re
from itertools import islice

import numpy as np
import pytest

from kvedge_lab.demo_tasks.scenes import code_is_held_out
from kvedge_lab.eval.tasks import page_names, page_samples
from kvedge_lab.page_tasks.evalset import PageSample, samples
from kvedge_lab.page_tasks.fonts import CELL
from kvedge_lab.page_tasks.pages import COLOURS, COLUMNS, Page, draw_page, render
from kvedge_lab.page_tasks.tasks import TASKS
from pykvedge.errors import UnknownNameError, UsageError


def padded(page: Page) -> list[str]:
    """The page as a person would type it off, a character for each cell."""
    grid = [[" "] * COLUMNS for _ in range(page.height)]
    for text in page.texts():
        for k, char in enumerate(text.text):
            assert grid[text.row][text.column + k] == " "  # nothing is printed over something else
            grid[text.row][text.column + k] = char
    return ["".join(row) for row in grid]


def lines(page: Page) -> list[str]:
    return [row.strip() for row in padded(page)]


def bars(page: Page) -> dict[str, tuple[str, int]]:
    """Colour and length in pixels of the bar beside each label, from the picture."""
    picture, out = render(page).astype(int), {}
    for row, line in enumerate(lines(page)):
        middle = picture[row * CELL + CELL // 2, 9 * CELL :]
        for name, colour in COLOURS.items():
            if (length := int((middle == colour).all(-1).sum())) > CELL // 2:
                out[line] = (name, length)
    return out


def answer_by_reading(task: str, pages: tuple[Page, ...], question: str) -> str:
    number = re.search(r" on page (\d)\?", question)
    page = pages[int(number[1]) - 1 if number else 0]
    about = re.sub(r" on page \d", "", question).rstrip("?").split()
    typed = lines(page)
    if task == "line":
        return next(line[2:] for line in typed if line.startswith(about[3] + " "))
    if task == "which-line":
        return next(line[0] for line in typed if line[:1].isdigit() and about[-1] in line.split())
    if task in ("price", "left"):
        item = about[-1] if task == "price" else about[2]
        return next(line for line in typed if line.split()[:1] == [item]).split()[1 if task == "price" else 2]
    if task == "colour":
        return bars(page)[about[-1]][0]
    if task == "longest":
        return max(bars(page).items(), key=lambda bar: bar[1][1])[0]
    if task == "code":
        return next(line.split()[1] for line in typed if line.startswith("code "))
    [found] = [n for n, one in enumerate(pages) if any(line.split()[:1] == [about[-1]] for line in lines(one))]
    return f"page {found + 1}"


def drawn(task: str, pages: int, count: int = 12, seed: int = 0) -> list[PageSample]:
    return list(islice(samples(task, seed, pages), count))


@pytest.mark.parametrize("task", TASKS)
def test_who_reads_the_pages_finds_the_answer(task):
    for pages in (1, 3) if task != "which-page" else (3,):
        for sample in drawn(task, pages):
            question = sample.question
            assert answer_by_reading(task, sample.pages, question.text) == question.answer
            assert len(question.sources) == len(question.answer)
            if task in ("line", "price", "left", "code", "longest"):
                at = {(k, t.row, t.column + c): char for k, page in enumerate(sample.pages)
                      for t in page.texts() for c, char in enumerate(t.text)}  # fmt: skip
                assert "".join(" " if s is None else at[s] for s in question.sources) == question.answer


def test_samples_follow_from_their_seed_and_are_held_out():
    assert drawn("code", 2) == drawn("code", 2) != drawn("code", 2, seed=1)
    assert all(code_is_held_out(page.code.text) for sample in drawn("code", 2) for page in sample.pages)
    rng = np.random.default_rng(0)
    assert not any(code_is_held_out(draw_page(rng).code.text) for _ in range(50))


def test_ink_is_where_the_text_is_and_nowhere_else():
    rng = np.random.default_rng(5)
    for page in [draw_page(rng, kind="text") for _ in range(20)]:
        picture = render(page).reshape(page.height, CELL, COLUMNS, CELL, 3)
        inked = (picture != np.array(page.look.paper)).any((1, 3, 4))
        assert inked.tolist() == [[char != " " for char in row] for row in padded(page)]


def test_eval_asks_about_the_pages_in_both_turns():
    [first], [second] = page_samples("page-line", 1, 3, 4), page_samples("page-line/2", 1, 3, 4)
    assert first.answer == second.answer and first.id != second.id
    assert [len(line.images) for line in first.lines] == [4] and [len(line.images) for line in second.lines] == [
        4,
        0,
        0,
    ]
    assert first.lines[0].text.count("Page ") == 4 and second.lines[-1].text in first.lines[0].text
    pictures = first.messages()[0].pictures
    assert [(p.width, p.height) for p in pictures] == [
        (COLUMNS * CELL, page.height * CELL) for page in first.lines[0].images
    ]
    assert "page-which-page" in page_names()
    with pytest.raises(UsageError, match="2 to 8 pages"):
        page_samples("page-which-page", 1, 0, 1)
    with pytest.raises(UnknownNameError):
        page_samples("page-poem", 1, 0, 1)
