"""kvedge eval --keep: later questions use whole rows, and are compressed as if everything had been one prompt."""

import pytest
from eval_runs import MMPROJ, MODEL, run

import pykvedge
from kvedge_lab.eval.measure import Cell, MeasureOptions
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import FULL, Job, evaluate
from kvedge_lab.eval.tasks import demo_samples
from pykvedge.runtime.settings import Settings

METHODS = ("snapkv", "lookm", "mixkv", "kvzip", "elastic", "kvedge")
CELLS = [Cell(name, pykvedge.plan(name, 0.2)) for name in METHODS]


def chains():
    return [s for task in ("code+where+colour+shape", "shape+code") for s in demo_samples(task, 2, 11, 4)]


@pytest.fixture(scope="module")
def one():
    """Rows of questions whose conversations were read as one prompt each."""
    return run(chains(), CELLS, compress="conversation")


@pytest.mark.parametrize(("keep", "cells"), [("ram", CELLS), ("disk", CELLS[:1])])
def test_later_questions_are_answered_as_if_all_were_one_prompt(native, one, keep, cells, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = run(chains(), cells, keep=keep)
    assert len(kept) == len(chains()) * (1 + len(cells))
    for key, row in kept.items():
        assert (row["answer"], row["kept"], row["tokens"]) == (one[key]["answer"], one[key]["kept"], one[key]["tokens"])
        assert row["kld"] == pytest.approx(one[key]["kld"], abs=1e-4)
        assert (row.get("whole_bytes", 0) > row["kept_bytes"]) == (row["method"] != FULL)
    assert any(row.get("whole_file_bytes") for row in kept.values()) == (keep == "disk")


def test_later_questions_are_answered_otherwise_without_whole_rows(native, one):
    """Without this difference, the test above could not fail."""
    without = run(chains(), CELLS)
    assert all("whole_bytes" not in row for row in without.values())
    assert sum(abs(row["kld"] - one[key]["kld"]) > 0.01 for key, row in without.items()) > len(chains())


def test_a_question_after_its_context_is_compressed_with_it(native, one):
    for key, row in run(chains(), CELLS, keep="ram", compress="context").items():
        assert row["answer"] == one[key]["answer"]
        assert row["kld"] == pytest.approx(one[key]["kld"], abs=1e-4)


def test_where_whole_rows_cannot_stay_nothing_is_measured(native):
    settings = Settings(keep="ram", keep_space=1000)
    records = Records(None, {}, False)
    out = evaluate(Job(MODEL, MMPROJ, chains()[:1], CELLS[:1], MeasureOptions(), settings), records)
    assert [row["method"] for row in records.rows.values()] == [FULL]
    assert len(out.left_out) == 1 and "snapkv at 0.2 left out: --keep had no effect" in out.left_out[0]


def test_results_say_whether_rows_were_kept(kvedge, tmp_path):
    file = tmp_path / "r.jsonl"
    small = ["eval", "--tasks", "shape+code", "--samples", 1, "--method", "knorm", "--metrics", "kld", "--save", file]
    assert kvedge(*small, "--keep", "ram").code == 0
    assert '"keep": "ram"' in file.read_text().splitlines()[0]
    kvedge(*small, "--resume").failed(2, "keep")
    assert kvedge(*small, "--resume", "--keep", "ram").code == 0
    kvedge(*small[:-2], "--keep", "ram", "--compress", "conversation").failed(2, "--compress conversation")
    kvedge(*small[:-2], "--keep-space", "1GiB").failed(2, "--keep disk")


def test_images_do_not_age_in_measurements(kvedge):
    """eval would ignore --age, so it refuses the option."""
    kvedge("eval", "--keep", "ram", "--age", "0.5").failed(2, "--age")
