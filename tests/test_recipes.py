"""Recipes: benchmarks in their original files, and a paper's figures beside those of a run."""

import io
import json
import shutil
import tarfile
import zipfile

import pytest
from conftest import ROOT
from hubserver import HubServer

from kvedge_lab.eval import downloads
from kvedge_lab.eval.datasets import DatasetError, load
from kvedge_lab.eval.recipes import RECIPES, as_rows, beside, figures, recipe
from kvedge_lab.eval.table import ALL, ResultRow
from pykvedge import HubError, UnknownNameError, plan

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


@pytest.mark.parametrize("form", FORMS)
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


@pytest.mark.parametrize("form", FORMS)
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
    with pytest.raises(DatasetError, match="has 2"):
        load(folder, form)


def test_needles_of_mm_niah(tmp_path):
    shutil.copy(SCENE, tmp_path / "a.png")
    item = {"id": 1, "images_list": ["a.png"], "context": "Long. <image> Text.", "question": "What?", "answer": "5F2"}
    lines = [item, {**item, "answer": 1, "meta": {"choices": ["red", "blue"]}}]
    (tmp_path / "n.jsonl").write_text("\n".join(map(json.dumps, lines)))
    one, two = load(tmp_path, "mm-niah")
    assert "Long. <image> Text.\nWhat?" in one.lines[0].text and one.score("It is 5F2.") == 1 == two.score("B")
    assert one.score("6") == 0 == two.score("A")
    few = {"meta": {"choices": ["red"]}}
    for wrong in ({"answer": [1, 2]}, {"answer": 9, **few}, {"images_list": []}, {"answer": None}):
        (tmp_path / "n.jsonl").write_text(json.dumps({k: v for k, v in (item | wrong).items() if v is not None}))
        with pytest.raises(DatasetError, match=r"line 1"):
            load(tmp_path, "mm-niah")


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
    """Some figures of each paper, typed a second time."""
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
    made = [ResultRow("snapkv", 64, ALL, 5, score=0.5), ResultRow("full", 1.0, ALL, 5, score=1.0)]
    captions, *_ = [r for r in as_rows("mixkv-textcaps", made) if (r["method"], r["budget"]) == ("full", 1.0)]
    assert (captions["figure"], captions["paper"], captions["this_run"]) == ("cider", 0.707, 1.0)
    text = beside("mixkv-docvqa", made)
    assert "This run / InternVL3-8B in MixKV, table 1." in text
    assert "| snapkv" in text and "50 / 75.7" in text and "100 / 90.96" in text and "- / 86.2" in text
    rows = as_rows("mixkv-docvqa", made)
    assert {"model": "InternVL3-8B", "method": "snapkv", "budget": 64, "figure": "score", "paper": 75.7,
            "this_run": 50.0} in rows  # fmt: skip
    many = [ResultRow("lookm", 0.2, "NH", 5, score=0.25), ResultRow("lookm", 0.2, ALL, 9, score=0.5)]
    assert "25 / 5.3" in beside("lookm-milebench", many)
    ppl = [ResultRow("prefixkv", 0.2, ALL, 5, ppl=2.5, rouge=0.9, rouge_full=0.75)]
    assert "2.5 / 3.69" in beside("prefixkv-llava-description", ppl) and "0.75 / 0.51" in beside(
        "prefixkv-llava-description", ppl
    )


def test_the_command(kvedge, tmp_path, native):
    folder = written(tmp_path, "ocrbench")
    saved, table, paper = tmp_path / "r.jsonl", tmp_path / "t.json", tmp_path / "p.tex"
    with HubServer() as hub:
        urls = [(hub_file(hub, folder, name), name) for name in ("d.json", "x/a.jpg")]
        entry = {"files": [{"url": url, "path": name} for url, name in urls], "data": "d.json"}
        (tmp_path / "m.json").write_text(json.dumps({"mixkv-ocrbench": entry}))
        env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
        got = ("--download", "--manifest", tmp_path / "m.json", "--paper", paper)
        done = kvedge("eval", "--recipe", "mixkv-ocrbench", *got, "--save", saved, env=env)
    shutil.rmtree(folder / "x")  # without the originals: the fetched files are measured
    folder = tmp_path / "cache" / "kvedge" / "data" / "mixkv-ocrbench"
    assert "downloading d.json" in done.err and r"& snapkv & 64 &" in paper.read_text()
    assert "This run / Qwen2-VL-7B-Instruct in MixKV, table 1." in done.out and "kvedge calibrate heads" in done.out
    kvedge("eval", "--recipe", "mixkv-ocrbench", folder, "--save", saved, "--resume", "--output", table)
    rows = json.loads(table.read_text())
    assert {r["method"] for r in rows["rows"]} >= {"full", "snapkv", "mixkv"} and len(rows["paper"]) == 69
    assert any(r["this_run"] is not None for r in rows["paper"] if r["method"] == "snapkv" and r["budget"] == 64)
    assert "mixkv-docvqa" in kvedge("eval", "--recipe", "list").out
    assert set(json.loads(kvedge("eval", "--recipe", "list", "--json").out)) == set(RECIPES)


def hub_file(hub, folder, name):
    hub.add("own/data", name, (folder / name).read_bytes())
    return f"{hub.url}/storage/own/data/{name}"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with HubServer() as server:
        yield server


def test_downloads_go_on_and_are_compared(hub, tmp_path, monkeypatch):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("in/d.json", "[]")
    file = hub.add("own/data", "a.zip", packed.getvalue() + bytes(1 << 16))
    hub.faults.cut = [30000, 20000]
    entry = {"url": f"{hub.url}/storage/own/data/a.zip", "path": "a.zip", "unpack": True, "sha256": file.checksum}
    given = {"files": [entry], "data": "in/d.json", "images": "in"}
    seen = []
    found = downloads.fetch(given, tmp_path / "f", lambda *told: seen.append(told))
    assert found.data.read_text() == "[]" and found.images == tmp_path / "f" / "in"
    assert [asked for _, _, asked in hub.requests] == [None, "bytes=30000-", "bytes=50000-"]
    assert seen[-1] == ("a.zip", len(file.data), len(file.data)) and hub.bytes_sent == len(file.data)
    hub.requests.clear()
    assert downloads.fetch(given, tmp_path / "f", print) == found and not hub.requests
    with pytest.raises(HubError, match="was removed, because its checksum is"):
        downloads.fetch({**given, "files": [{**entry, "sha256": "0" * 64}]}, tmp_path / "g", lambda *_: None)
    assert not list((tmp_path / "g").iterdir())
    trusted = {**given, "files": [{"url": entry["url"], "path": "a.zip"}]}
    downloads.fetch(trusted, tmp_path / "t", lambda *_: None)
    assert file.checksum in (tmp_path / "t" / "a.zip.sha256").read_text()
    (tmp_path / "t" / "a.zip").unlink()
    hub.add("own/data", "a.zip", b"other")
    with pytest.raises(HubError, match=r"remove a\.zip\.sha256"):
        downloads.fetch(trusted, tmp_path / "t", lambda *_: None)
    hub.faults.statuses = [404]
    with pytest.raises(HubError, match="status 404"):
        downloads.fetch(trusted, tmp_path / "n", lambda *_: None)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1))
    with pytest.raises(HubError, match=r"needs 0\.0 KiB in"):
        downloads.fetch(trusted, tmp_path / "n", lambda *_: None)
    gone = {**given, "files": [{"url": "http://127.0.0.1:9/a", "path": "a"}]}
    with pytest.raises(HubError, match="cannot be reached"):
        downloads.fetch(gone, tmp_path / "n", lambda *_: None)


def test_a_tar_stays_in_its_folder_or_is_left_as_it_is(tmp_path, monkeypatch):
    def packed(folder, member):
        (tmp_path / folder).mkdir()
        with tarfile.open(tmp_path / folder / "a.tar.gz", "w:gz") as archive:
            info = tarfile.TarInfo(member)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"[]"))
        return tmp_path / folder, {"files": [{"path": "a.tar.gz", "unpack": True}], "data": "in/d.json"}

    folder, given = packed("f", "in/d.json")
    assert downloads.fetch(given, folder, print).data.read_text() == "[]"
    folder, given = packed("g", "../d.json")
    with pytest.raises(HubError, match="cannot be unpacked"):
        downloads.fetch(given, folder, print)
    assert not (tmp_path / "d.json").exists()
    folder, given = packed("old", "in/d.json")
    monkeypatch.delattr(tarfile, "data_filter")  # as Python before 3.10.12 is
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: None)
    with pytest.raises(HubError, match=r"from Python 3\.10\.12 on; .* make a\.tar\.gz\.unpacked$"):
        downloads.fetch(given, folder, print)
    (folder / "in").mkdir()
    (folder / "in" / "d.json").write_text("[1]")
    (folder / "a.tar.gz.unpacked").touch()
    assert downloads.fetch(given, folder, print).data.read_text() == "[1]"


@pytest.mark.parametrize(
    "entry",
    [3, {}, {"page": "x"}, {"data": "d", "files": [{"url": "http://x"}]},
     {"data": "d", "files": [{"url": "http://x", "path": "../d"}]},
     {"data": "d", "files": [{"url": "ftp://x", "path": "d"}]},
     {"data": "d", "files": [{"url": "http://x", "path": "d", "sha256": "abc"}]}],
)  # fmt: skip
def test_manifests_that_are_refused(tmp_path, entry):
    (tmp_path / "m.json").write_text(json.dumps({"a": entry}))
    with pytest.raises(DatasetError):
        downloads.read_manifest(tmp_path / "m.json", "a")


def test_the_packaged_manifest_can_be_read():
    for name in json.loads(downloads.MANIFEST.read_text(encoding="utf-8")):
        assert name in RECIPES
        try:
            assert downloads.read_manifest(downloads.MANIFEST, name)["files"]
        except DatasetError as error:
            assert "https://" in str(error)


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--recipe", "mixkv-ocrbench"], "needs DATA"), (["--recipe", "x", "y"], "unknown recipe 'x'"),
        (["--recipe", "mixkv-ocrbench", "d", "--method", "lookm"], "--recipe excludes --method"),
        (["--recipe", "mixkv-ocrbench", "d", "--budget", "0.2"], "--recipe excludes --budget"),
        (["--recipe", "mixkv-ocrbench", "d", "--tasks", "code"], "--recipe excludes --tasks"),
        (["--recipe", "mixkv-ocrbench", "/none"], "does not exist"), (["--download"], "need a recipe"),
        (["--recipe", "mixkv-docvqa", "--download"], "after registration"),
        (["--recipe", "mixkv-docvqa", "d", "--paper", "t.doc"], "must end in .md, .tex or .csv"),
    ],
)  # fmt: skip
def test_what_cannot_be(kvedge, args, what):
    kvedge("eval", *args).failed(2, what)
