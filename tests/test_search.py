"""The search for compositions: what is tried, how it is measured, who goes on, and scenes that are in one part only."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT
from eval_runs import run

import pykvedge
from kvedge_lab.demo_tasks.scenes import PARTS
from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.search import Space, Standing, halving, standings
from kvedge_lab.eval.tasks import demo_samples

SMALL = Space(
    scorers={"window": [{}, {"scorer.window": 8}], "knorm": [{}]},
    allocators={"uniform": [{}], "ada": [{}]},
    reducers={"evict": [{}], "averaged": [{}]},
    others=({}, {"recent": 4}),
)


def test_the_product_of_the_stages():
    cells = list(SMALL.cells("0.2"))
    assert len(cells) == 3 * 2 * 2 * 2 == len({cell.name for cell in cells}) == len({cell.digest for cell in cells})
    found = {cell.name: cell.plan for cell in cells}
    assert found["window+ada+averaged recent=4 scorer.window=8"] == pykvedge.plan(
        "knorm", 0.2, scorer="window", allocator="ada", reducer="averaged", recent=4, **{"scorer.window": 8}
    )
    wrong = Space({"window": [{}, {"scorer.window": -1}], "knorm": [{}]}, {"uniform": [{}]}, {"evict": [{}]})
    assert [cell.name for cell in wrong.cells("0.2")] == ["window+uniform+evict", "knorm+uniform+evict"]


def test_losses_by_hand(native):
    samples = [s for name in ("code", "describe") for s in demo_samples(name, 2, 3, 4, "search")]
    cells = [Cell(name, pykvedge.plan(name, 0.1)) for name in ("snapkv", "random")]
    rows = run(samples, cells, answers=False, compress="context")
    found = {one.cell.name: one for one in standings([*cells, Cell("other", cells[0].plan)], samples, rows)}
    assert set(found) == {"snapkv", "random"}  # the other one was not measured
    for name, one in found.items():
        for task in ("code", "describe"):
            of = [rows[s.id, name, "0.1"] for s in samples if s.task == task]
            assert one.loss[task] == pytest.approx(sum(math.log(1 + r["kld"] / r["tokens"]) for r in of) / 2)
            assert one.agrees[task] == pytest.approx(sum(r["top1"] for r in of) / sum(r["tokens"] for r in of))
        assert one.mean == pytest.approx((one.loss["code"] + one.loss["describe"]) / 2)
    assert found["random"].mean > 0


def test_the_better_ones_go_on():
    cells = list(SMALL.cells("0.2"))
    loss = {cell.name: float(i) for i, cell in enumerate(cells)}
    asked = []

    def measure(count, left):
        asked.append((count, len(left)))
        low = cells[0].name  # the least loss, and a task that it loses
        agrees = {cell.name: {"a": 1.0, "b": 0.3 if cell.name == low else 0.9} for cell in left}
        return [Standing(cell, {"a": loss[cell.name], "b": 0.0}, agrees[cell.name]) for cell in left]

    found = halving(cells, (1, 4, 16), 0.25, 0.5, measure)
    assert asked == [(1, 24), (4, 6), (16, 2)]
    assert [one.cell for one in found] == cells[1:3]
    assert halving(cells, (1,), 0.25, 0.0, measure)[0].cell == cells[0]
    assert [one.cell for one in halving(cells[:1], (1, 2), 0.25, 0.5, measure)] == cells[:1]


def test_no_scene_is_in_two_parts():
    codes, names = {}, ("code", "difference", "code-in-image-k", "code+where", "which-image+code-in-image-k")
    for part in PARTS:
        found = [s for name in names for s in demo_samples(name, 20, 1, 3, part)]
        assert len({sample.id for sample in found}) == 100
        codes[part] = {scene.code for sample in found for line in sample.lines for scene in line.images}
        assert all(scene.held_out for sample in found for line in sample.lines for scene in line.images)
    assert not codes["search"] & codes["validation"] and not codes["search"] & codes["test"]
    assert not codes["validation"] & codes["test"]
    with pytest.raises(ValueError, match="no part"):
        demo_samples("code", 1, 0, 4, "other")
    with pytest.raises(ValueError, match="no part"):
        demo_samples("code+where", 1, 0, 4, "other")


def test_the_script_tells_a_plan_that_can_be_used(native, tmp_path):
    code = (
        "import sys, search_plans as s; from kvedge_lab.eval.search import Space; "
        "s.SPACE = Space({'window': [{}], 'random': [{}]}, {'uniform': [{}]}, {'evict': [{}]}); "
        "s.methods = lambda: ['full', 'knorm']; s.main()"
    )
    command = [sys.executable, "-c", code, "--budget", "0.3", "--tasks", "code", "--rounds", "1,2", "--keep", "0.5"]
    done = [
        subprocess.run([*command, "--save", str(tmp_path / "s.jsonl")], cwd=ROOT / "scripts", text=True,
                       capture_output=True, check=True, timeout=120)
        for _ in range(2)
    ]  # fmt: skip
    assert done[0].stdout == done[1].stdout  # the second one measures nothing
    found = json.loads(done[0].stdout)["0.3"]
    assert found["tried"] == 2 and [one["name"] for one in found["search"]] == ["window+uniform+evict"]
    assert {one["name"] for one in found["validation"]} == {"window+uniform+evict", "knorm"}
    (tmp_path / "p.json").write_text(json.dumps(found["search"][0]["plan"]))
    assert pykvedge.Plan.from_json((tmp_path / "p.json").read_text()).scorer == "window"
