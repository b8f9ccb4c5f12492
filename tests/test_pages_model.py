"""The second model, end to end: it reads held-out pages, one and several, with the full cache."""

from pathlib import Path

from kvedge_lab.eval.measure import Wants
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import Job, evaluate
from kvedge_lab.eval.tasks import page_samples

DATA = Path(__file__).parent / "data" / "pages"
TASKS = ("line", "price", "left", "colour", "code")


def test_pages_are_read():
    asked = [one for task in TASKS for pages in (1, 3) for one in page_samples(f"page-{task}", 1, 7, pages)]
    job = Job(DATA / "pages-model.gguf", DATA / "pages-mmproj.gguf", asked, [], Wants(likelihood=False))
    rows = evaluate(job, Records(None, {}, False)).records.rows.values()
    assert sum(row["answer"].strip() == row["reference"] for row in rows) >= 0.9 * len(asked)


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 12_000_000
