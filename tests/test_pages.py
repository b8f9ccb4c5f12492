"""The pages of the second model and their questions: reproducible, held out, and equal to the published sets."""

import hashlib
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kvedge_lab.demo_tasks.scenes import code_is_held_out
from kvedge_lab.eval.measure import MeasureOptions
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import Job, evaluate
from kvedge_lab.eval.tasks import page_names, page_samples
from kvedge_lab.page_tasks.evalset import PageSample, samples
from kvedge_lab.page_tasks.pages import CELL, COLUMNS, draw_page, render
from kvedge_lab.page_tasks.tasks import TASKS
from pykvedge.errors import UnknownNameError, UsageError

DATA = Path(__file__).parent / "data" / "pages"


def drawn(task: str, pages: int, count: int = 12, seed: int = 0) -> list[PageSample]:
    return list(islice(samples(task, seed, pages), count))


DRAWN = {  # digest of the first 12 samples with two pages, and with four: pictures, questions, answers, source cells
    "line": "658b32c2de63bb9a",
    "which-line": "acf69e01ca96c475",
    "price": "6cc824a9c1b2a251",
    "left": "6075ec925f77226e",
    "colour": "dc7bcad29f228d42",
    "longest": "219e8a38c3337bb4",
    "code": "80e0e562d682d241",
    "which-page": "55434349103fe676",
}


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_those_that_figures_were_published_of(task):
    digest = hashlib.sha256()
    for sample in (*drawn(task, 2), *drawn(task, 4)):
        for page in sample.pages:
            digest.update(render(page).tobytes())
        question = sample.question
        digest.update(json.dumps([question.text, question.answer, question.sources], default=int).encode())
    assert digest.hexdigest()[:16] == DRAWN[task]


def test_samples_follow_from_their_seed_and_are_held_out():
    assert drawn("code", 2) == drawn("code", 2) != drawn("code", 2, seed=1)
    assert all(code_is_held_out(page.code.text) for sample in drawn("code", 2) for page in sample.pages)
    rng = np.random.default_rng(0)
    assert not any(code_is_held_out(draw_page(rng).code.text) for _ in range(50))


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


def test_the_second_model_reads_pages():
    """Held-out pages, one and several, with the full cache."""
    tasks = ("line", "price", "left", "colour", "code")
    asked = [one for i, task in enumerate(tasks) for one in page_samples(f"page-{task}", 1, 7, 3 if i % 2 else 1)]
    job = Job(DATA / "pages-model.gguf", DATA / "pages-mmproj.gguf", asked, [], MeasureOptions(likelihood=False))
    rows = evaluate(job, Records(None, {}, False)).records.rows.values()
    assert sum(row["answer"].strip() == row["reference"] for row in rows) >= 0.9 * len(asked)


def test_the_files_of_the_second_model_are_small():
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 12_000_000
