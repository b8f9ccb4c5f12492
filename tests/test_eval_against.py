"""kvedge eval --against: changes are relative to another method, on the same samples, at the same budget."""

import numpy as np
import pytest
from conftest import THREADS

import pykvedge
from kvedge_lab.eval import table
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.metrics import paired_interval, score_interval
from kvedge_lab.eval.runner import full_cell
from kvedge_lab.eval.tasks import DialogMessage, Sample

BUDGETS = (0.5, 0.1)
SAMPLES = [Sample(f"s{i}", "task", (DialogMessage("user", "?"),), "yes") for i in range(12)]
CELLS = [full_cell(), *(Cell(name, pykvedge.plan(name, b)) for name in ("snapkv", "mixkv") for b in BUDGETS)]


def records(leave_out=()):
    """Returns random records for every sample and cell."""
    rng, out = np.random.default_rng(5), {}
    for cell in CELLS:
        for sample in SAMPLES:
            figures = {"score": float(rng.integers(2)), "nll": rng.gamma(2.0), "tokens": int(rng.integers(1, 5))}
            row = {"id": sample.id, "method": cell.name, "budget": cell.budget, "prompt_tokens": 50, **figures}
            row["kld"] = 0.0 if cell.name == "full" else rng.gamma(1.0)
            if (sample.id, cell.name, str(cell.budget)) not in leave_out:
                out[sample.id, cell.name, str(cell.budget)] = row
    return out


def column(rows, method, budget, name):
    return np.array([rows[s.id, method, str(budget)][name] for s in SAMPLES], dtype=float)


def test_changes_are_those_of_the_pairs():
    rows = records()
    made = {(m.method, m.budget): m for m in table.lines(rows, SAMPLES, CELLS, "snapkv") if m.task == "all"}
    for budget in BUDGETS:
        line = made["mixkv", budget]
        score, base = (column(rows, name, budget, "score") for name in ("mixkv", "snapkv"))
        low, high = line.score_change
        assert low <= score.mean() - base.mean() <= high
        zero = np.zeros(len(score))
        assert line.score_change == pytest.approx(score_interval(score, base))
        kld, other, weights = (column(rows, *x) for x in (
            ("mixkv", budget, "kld"), ("snapkv", budget, "kld"), ("mixkv", budget, "tokens")))  # fmt: skip
        assert line.kld_change == pytest.approx(paired_interval(kld - other, weights, zero))
        own = made["snapkv", budget]
        assert own.score_change is own.ppl_change is own.kld_change is None and own.ppl > 1
    assert made["full", 1.0].ppl_change is None


def test_samples_that_the_base_lacks_leave_the_interval_out():
    rows = records(leave_out={("s3", "snapkv", "0.1")})
    made = {(m.method, m.budget): m for m in table.lines(rows, SAMPLES, CELLS, "snapkv") if m.task == "all"}
    assert made["mixkv", 0.1].score_change is None and made["mixkv", 0.1].score is not None
    assert made["mixkv", 0.5].score_change is not None


def test_the_command(kvedge, native, tmp_path):
    common = ["eval", "--tasks", "colour", "--samples", 5, "--budget", "0.5,0.1", "--threads", THREADS, "--quiet",
              "--save", tmp_path / "r.jsonl", "--resume", "--method", "mixkv,snapkv"]  # fmt: skip
    done = kvedge(*common, "--against", "snapkv")
    assert done.code == 0 and "95 % intervals of the difference to snapkv at the same budget" in " ".join(
        done.out.split()
    )
    asked = kvedge(*common, "--against", "snapkv", "--json").json
    assert asked["against"] == "snapkv"
    changes = {(r["method"], r["budget"]): r["kld_change"] for r in asked["rows"] if r["task"] == "all"}
    assert changes["mixkv", 0.1] and changes["mixkv", 0.5] and not changes["snapkv", 0.1] and not changes["full", 1.0]
    against_full = kvedge(*common, "--json").json
    assert against_full["against"] == "full"
    assert all(r["kld_change"] for r in against_full["rows"] if r["method"] != "full")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "mixkv", "--against", "snapkv"], "--against snapkv is not measured; add snapkv to --method"),
        (["--method", "mixkv", "--against", "nothing"], "--against nothing is not measured"),
    ],
)
def test_what_is_not_measured_is_no_base(kvedge, native, options, words):
    done = kvedge("eval", "--tasks", "colour", "--samples", 1, *options)
    assert done.code == 2 and words in done.err and len(done.err.strip().splitlines()) == 1


def test_a_plan_with_a_budget_of_its_own_has_no_partner(kvedge, native, tmp_path):
    plan = tmp_path / "mine.json"
    plan.write_text(pykvedge.plan("h2o", 0.3).to_json())
    done = kvedge(
        "eval", "--tasks", "colour", "--samples", 1, "--method", "snapkv", "--plan", plan, "--against", "snapkv"
    )
    assert done.code == 2 and "--against snapkv is not measured at budget 0.3 of mine" in done.err
