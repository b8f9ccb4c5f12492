"""Recipes: benchmarks as they lie on disk, and a paper's figures beside those of a run."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import ROOT

from kvedge_lab.eval.benchmarks import FORMATS
from kvedge_lab.eval.datasets import DatasetError, load
from kvedge_lab.eval.recipes import RECIPES, as_rows, beside, figures, recipe
from kvedge_lab.eval.table import ALL, Line
from pykvedge.errors import UnknownNameError
from pykvedge.plans.making import plan

SCENE = ROOT / "examples" / "scene-1.png"
FORMS = {
    "docvqa": ({"data": [{"questionId": 7, "question": "What is the code?", "image": "documents/a.png",
                          "answers": ["5F2", "five"]}]}, "documents/a.png"),
    "textvqa": ({"data": [{"question_id": 7, "question": "What is the code?", "image_id": "a",
                           "answers": ["5F2"] * 10}]}, "train_images/a.jpg"),
    "chartqa": ([{"imgname": "a.png", "query": "What is the code?", "label": 5}], "png/a.png"),
    "textcaps": ({"data": [{"image_id": name, "caption_id": i, "reference_strs": [f"The code is {name}.", "a code"]}
                           for name in ("a", "b") for i in range(2)]}, "train_images/a.jpg"),
    "ocrbench": ([{"id": 7, "image_path": "x/a.jpg", "question": "What is the code?", "answers": "5F2"}], "x/a.jpg"),
}  # fmt: skip


def written(folder, form):
    data, picture = FORMS[form]
    (folder / picture).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(SCENE, folder / picture)
    if form == "textcaps":
        shutil.copy(SCENE, folder / "train_images" / "b.jpg")
    (folder / "d.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_benchmarks_as_they_lie_on_disk(tmp_path, form):
    sample, *more = load(written(tmp_path, form), form)
    asked = "Provide a one-sentence caption" if form == "textcaps" else "What is the code?"
    assert sample.lines[0].text.startswith(asked) and sample.lines[0].images[0].is_file()
    assert load(tmp_path / "d.json", form) == [sample, *more] and len(more) == (form == "textcaps")
    assert sample.score(sample.answer) == (pytest.approx(3.75) if more else 1)
    assert sample.score("nothing of the kind") == 0
    assert (sample.metric, len(sample.others)) == {"docvqa": ("anls", 1), "textvqa": ("vqa", 9),
                                                   "chartqa": ("relaxed", 0), "ocrbench": ("ocr", 0),
                                                   "textcaps": ("cider", 1)}[form]  # fmt: skip
    if form == "ocrbench":
        assert sample.score("The code is 5f\n2.") == 1


@pytest.mark.parametrize("form", FORMATS)
def test_benchmarks_that_are_none(tmp_path, form):
    folder = written(tmp_path, form)
    for data in ({}, [5], {"data": [5]}, {"data": 3}, [], {"data": []}):
        (folder / "d.json").write_text(json.dumps(data))
        with pytest.raises(DatasetError):
            load(folder, form)
    data = json.loads(json.dumps(FORMS[form][0]).replace("a.png", "gone.png").replace("a.jpg", "gone.jpg"))
    if form in ("textvqa", "textcaps"):
        data["data"][0]["image_id"] = "gone"
    (folder / "d.json").write_text(json.dumps(data))
    with pytest.raises(DatasetError, match="gone"):
        load(folder, form)
    (folder / "e.json").write_text("{}")
    with pytest.raises(DatasetError, match="holds 2"):
        load(folder, form)


def test_every_recipe_can_be_measured():
    for name, one in RECIPES.items():
        methods = {method[0] for method in one.named()}
        for _, method, settings in one.named():
            for budget in one.budgets:
                plan(method, budget, **settings)
        for figure in figures(name):
            assert figure.method in methods | {"full"}
            assert figure.method == "full" or figure.budget in [plan("lookm", b).budget.value for b in one.budgets]
    with pytest.raises(UnknownNameError, match="did you mean 'mixkv-docvqa'"):
        recipe("mixkv-docqa")


def test_the_papers_figures_are_those_of_its_tables():
    """A few of each, read off the papers again."""
    said = {(n, f.model, f.method, f.budget): f.columns for n in RECIPES for f in figures(n)}
    assert said["mixkv-ocrbench", "Qwen2-VL-7B-Instruct", "mixkv", 64] == {"score": 66.0}
    assert said["mixkv-docvqa", "InternVL3-8B", "adakv", 128] == {"score": 86.0}
    assert said["mixkv-chartqa", "LLaVA-NeXT-Mistral-7B", "mixkv-sparsemm", 256] == {"score": 51.8}
    assert said["prefixkv-llava-description", "LLaVA-1.5-7B", "prefixkv", 0.2] == {"ppl": 3.69, "rouge": 0.51}
    assert said["prefixkv-mm-vet", "LLaVA-1.5-13B", "elastic", 0.9] == {"ppl": 4.81, "rouge": 0.56}
    assert said["lookm-milebench", "LLaVA-v1.5-7B", "lookm", 0.2]["NH"] == 5.3
    assert said["lookm-milebench", "LLaVA-v1.5-13B", "full", 1.0]["IR"] == 1.0
    assert said["flashcache-milebench", "Qwen2.5-VL-7B", "flashcache", 0.2] == {"NH": 26.72, "IR": 15.5}


def test_figures_beside_each_other():
    made = [Line("snapkv", 64, ALL, 5, score=0.5), Line("full", 1.0, ALL, 5, score=1.0)]
    captions, *_ = [r for r in as_rows("mixkv-textcaps", made) if (r["method"], r["budget"]) == ("full", 1.0)]
    assert (captions["figure"], captions["paper"], captions["this_run"]) == ("cider", 0.707, 1.0)
    text = beside("mixkv-docvqa", made)
    assert "This run / InternVL3-8B in MixKV, table 1." in text
    assert "| snapkv" in text and "50 / 75.7" in text and "100 / 90.96" in text and "- / 86.2" in text
    rows = as_rows("mixkv-docvqa", made)
    assert {"model": "InternVL3-8B", "method": "snapkv", "budget": 64, "figure": "score", "paper": 75.7,
            "this_run": 50.0} in rows  # fmt: skip
    many = [Line("lookm", 0.2, "NH", 5, score=0.25), Line("lookm", 0.2, ALL, 9, score=0.5)]
    assert "25 / 5.3" in beside("lookm-milebench", many)
    ppl = [Line("prefixkv", 0.2, ALL, 5, ppl=2.5, rouge=0.9, rouge_full=0.75)]
    assert "2.5 / 3.69" in beside("prefixkv-llava-description", ppl) and "0.75 / 0.51" in beside(
        "prefixkv-llava-description", ppl
    )


def test_the_command(kvedge, tmp_path, native):
    folder = written(tmp_path, "ocrbench")
    saved, table = tmp_path / "r.jsonl", tmp_path / "t.json"
    done = kvedge("eval", "--recipe", "mixkv-ocrbench", folder, "--save", saved)
    assert "This run / Qwen2-VL-7B-Instruct in MixKV, table 1." in done.out and "kvedge calibrate heads" in done.out
    kvedge("eval", "--recipe", "mixkv-ocrbench", folder, "--save", saved, "--resume", "--output", table)
    rows = json.loads(table.read_text())
    assert {r["method"] for r in rows["rows"]} >= {"full", "snapkv", "mixkv"} and len(rows["paper"]) == 69
    assert any(r["this_run"] is not None for r in rows["paper"] if r["method"] == "snapkv" and r["budget"] == 64)
    assert "mixkv-docvqa" in kvedge("eval", "--recipe", "list").out
    assert set(json.loads(kvedge("eval", "--recipe", "list", "--json").out)) == set(RECIPES)


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--recipe", "mixkv-ocrbench"], "needs its data"), (["--recipe", "x", "y"], "unknown recipe 'x'"),
        (["--recipe", "mixkv-ocrbench", "d", "--method", "lookm"], "--method and --recipe"),
        (["--recipe", "mixkv-ocrbench", "d", "--budget", "0.2"], "--budget and --recipe"),
        (["--recipe", "mixkv-ocrbench", "d", "--tasks", "code"], "--tasks and --recipe"),
        (["--recipe", "mixkv-ocrbench", "/none"], "does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be(kvedge, args, what):
    kvedge("eval", *args).failed(2, what)
