"""kvedge tune: intervals, the choice, a small run that is stopped and continued, and the users of the stored plan."""

import importlib
import json
import shutil
import threading
from itertools import islice

import numpy as np
import pytest
from conftest import ROOT, THREADS
from PIL import Image

import pykvedge
from kvedge_lab.eval.measure import PROMPT, Cell
from kvedge_lab.progress import Steps
from kvedge_lab.tune import certificate, choice, figures, material, sheets
from kvedge_lab.tune.race import Race, RaceRecords
from pykvedge import CancelledError, ProfileError, Settings, UsageError
from pykvedge.models import profiles, tuned
from pykvedge.system.files import DATA

MODEL, MMPROJ = DATA / "demo-model.gguf", DATA / "demo-mmproj.gguf"
SCENE = ROOT / "examples" / "scene-1.png"
DEFAULT = Cell("kvedge", pykvedge.default_plan())
POOR = Cell("streaming-llm", pykvedge.plan("streaming-llm", 0.05))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without profiles or certificates."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


# ------------------------------------------------------------------------------------------------------------
# Figures


def test_intervals_hold_where_tokens_of_a_context_agree_together():
    """Intervals hold when the tokens of a context correlate. A worse plan's hits estimate this correlation."""
    rng, within, naive, runs = np.random.default_rng(0), 0, 0, 600
    for _ in range(runs):
        share, totals = 0.97, rng.integers(40, 120, 24).astype(float)
        of = rng.beta(9 * share, 9 * (1 - share), len(totals))
        hits = rng.binomial(totals.astype(int), of).astype(float)
        worse = rng.binomial(totals.astype(int), rng.beta(8, 1, len(totals))).astype(float)
        low, high = figures.share_interval(hits, totals, figures.design_effect(worse, totals), 0.95)
        within += low <= share <= high
        mean = hits.sum() / totals.sum()
        naive += abs(mean - share) <= 1.96 * np.sqrt(mean * (1 - mean) / totals.sum())
    assert within / runs > 0.92 > 0.8 > naive / runs


def test_no_disagreement_is_no_certainty():
    low, high = figures.share_interval(np.full(8, 50.0), np.full(8, 50.0), 4.0, 0.95)
    assert 0.94 < low < 0.97 and high == 1.0


def found(**plans):
    """Returns figures by name. plans: (bytes, agreement, half of the interval)."""
    return {
        (name, "0.5"): figures.Figures(
            name, 0.5, 20, 2000, share, share - half, min(share + half, 1.0), share, (0.0, 1.0), 0.1, None, size, 1e6
        )
        for name, (size, share, half) in plans.items()
    }  # fmt: skip


def cells(*names):
    return [Cell(name, pykvedge.plan("kvedge", 0.5)) for name in names]


def test_the_cheapest_plan_whose_interval_reaches_the_target_is_taken():
    at = found(usual=(0.5, 0.999, 0.001), good=(0.2, 0.995, 0.004), lucky=(0.1, 0.996, 0.02), bad=(0.3, 0.8, 0.1))
    usual, good, lucky, bad = all_cells = cells("usual", "good", "lucky", "bad")
    assert choice.taken(all_cells, at, 0.99, usual) == good
    assert choice.taken(all_cells, at, 0.9985, usual) is None and choice.nearest(at).method == "usual"
    assert choice.finalists(all_cells, at, 0.99, usual) == [good, usual]
    assert choice.finalists([usual, lucky, bad], at, 0.99, usual)[0] in (lucky, bad)  # the nearest, as none reaches it
    assert usual in choice.survivors(all_cells, at, 0.99, usual)


def test_no_plan_is_taken_that_is_worse_than_the_default_one_in_both():
    at = found(usual=(0.4, 0.999, 0.012), larger=(0.5, 0.995, 0.001))
    usual, larger = cells("usual", "larger")
    assert choice.taken([usual, larger], at, 0.99, usual) is None
    assert choice.finalists([usual, larger], at, 0.99, usual) == [usual]


# ------------------------------------------------------------------------------------------------------------
# A run


def race(loan, path, cancel, contexts=18, plans=(DEFAULT, POOR)):
    drawn = material.scenes(3, ["What is the code?"])
    of = material.Material("scenes", islice(drawn.contexts, contexts), size=contexts)
    kept, settings = RaceRecords(path, {"run": 1}), Settings(threads=THREADS)
    return Race(loan, settings, of, list(plans), DEFAULT, 0.6, 600.0, kept, Steps(enabled=False), cancel)


def nothing_first(reader):
    pass


def test_a_run_that_was_stopped_goes_on_and_chooses_what_it_would_have_chosen(home):
    with pykvedge.load(threads=THREADS) as loaded:
        loan, path = loaded.lend(), home / "run.jsonl"
        first = race(loan, path, threading.Event())
        add = first.kept.add

        def stop(record):
            add(record)
            if len(first.kept.rows) == 31:
                first.cancel.set()

        first.kept.add = stop
        with pytest.raises(CancelledError):
            first.run(nothing_first)
        first.kept.close()
        again = race(loan, path, threading.Event())
        assert len(again.kept.rows) == 31
        again.run(nothing_first)
        again.kept.close()
        said = certificate.verdict(again)
        rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        names = [(row["id"], row["method"]) for row in rows]
        assert len(names) == len(set(names)) == len(again.kept.rows)
        assert said.taken == DEFAULT and not said.why and said.proof.contexts == 9
        says = certificate.made(again, said.taken, said.proof, said.why, "kvedge tune")
        assert "streaming-llm" in certificate.page(says) and "<svg" in certificate.page(says)
        _check_answers(loaded, again)
        loan.give_back()


def _check_answers(loaded, run):
    """A plan's likeliest tokens equal the reference's if and only if a session with the plan gives the same answer."""
    seen = set()
    for plan in (DEFAULT, POOR):
        with pykvedge.Session(loaded, plan=plan.plan, threads=THREADS) as session:
            for context in run.contexts[:4]:
                sample = next(one for one in context if one.id.endswith(f":{PROMPT}"))
                full = run.kept.rows[sample.id, "full", "1.0"]["answer"]
                [message] = sample.messages()
                session.clear()
                said = "".join(session.ask(message.text, message.pictures)).strip()
                row = run.kept.rows[(sample.id, *plan.key)]
                assert (row["top1"] == row["tokens"]) == (said == full)
                seen.add(said == full)
    assert seen == {True, False}


def test_answers_that_say_nothing_promise_nothing(home):
    """Answers that are the same for every picture, or that the model is unsure of, prove nothing."""
    drawn = [[one] for context in islice(material.scenes(0, ["What?"]).contexts, 12) for one in context]
    asked = [[one] for [one] in drawn if len(one.lines[0].images) == 1]

    def told(answer, sure):
        rows = {(one.id, "full", "1.0"): {"tokens": 10, "sure": sure, "answer": answer(i)}
                for i, [one] in enumerate(asked)}  # fmt: skip
        return figures.telling(rows, asked)

    assert len(asked) > 5 and told(str, 9.0) == {"sure": 0.9, "alike": 1 / len(asked)}
    assert told(lambda i: "noise", 9.0)["alike"] == 1.0 and told(str, 2.0)["sure"] == 0.2


def test_an_unfinished_run_belongs_to_its_questions_and_pictures(home, refused, monkeypatch):
    headers, questions, pictures = [], home / "questions.txt", home / "pictures"

    def stop(held, files, header, fresh):
        headers.append(header)
        raise UsageError("enough")

    monkeypatch.setattr(importlib.import_module("kvedge_lab.commands.tune"), "_kept", stop)
    pictures.mkdir()
    for i in range(24):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(pictures / f"{i}.bmp")
    tried = [("What is it?", 0), ("What is it?\n\nWhat is it?\n", 0), ("What is that?", 0), ("What is it?", 255)]
    for text, green in tried:
        questions.write_text(text)
        Image.new("RGB", (8, 8), (0, green, 0)).save(pictures / "0.bmp")
        refused("tune", "--questions", questions, "--images", pictures).failed(2, "enough")
    first, same, others, edited = headers
    assert first == same and material.read_questions(questions) == ["What is it?"]
    assert [name for name in first if first[name] != others[name]] == ["questions"]
    assert [name for name in first if first[name] != edited[name]] == ["pictures"]


def test_pictures_of_a_folder(tmp_path, monkeypatch):
    for i in range(30):
        sheets.draw(tmp_path / f"{i}.png", 0, i)
    again = tmp_path / "again"
    again.mkdir()
    sheets.draw(again / "0.png", 0, 0)
    assert Image.open(again / "0.png").tobytes() == Image.open(tmp_path / "0.png").tobytes()
    (tmp_path / "bad.png").write_bytes(b"no picture")
    shutil.rmtree(again)
    (tmp_path / "notes.txt").write_text("no picture either")
    drawn = material.folder(tmp_path, 1, [], 16)
    contexts = list(drawn.contexts)
    images = [image for context in contexts for image in context[0].lines[0].images]
    assert len(images) == len(set(images)) == 30 and drawn.size == len(contexts)
    assert drawn.notes == ("1 picture is left out, because it cannot be read: bad.png",)
    monkeypatch.setattr(material, "MOST", 20)
    assert "31 pictures" in material.folder(tmp_path, 1, [], 8).notes[-1]
    with pytest.raises(UsageError, match=r"20 usable pictures \(1 picture is left out"):
        material.folder(tmp_path, 1, [], 40)


# ------------------------------------------------------------------------------------------------------------
# The stored plan


def certify(plan, model=MODEL, met=True):
    digests = tuned.digests(plan, model)
    proof = {"agreement": 0.995, "low": 0.991, "high": 0.998, "bytes": 0.1}
    says = {"kvedge_tuned": 1, "model": {"hash": profiles.hash_of(model), "name": model.name}, "met": met,
            "target": 0.99, "plan": json.loads(plan.to_json()), "profiles": digests, "proof": proof}  # fmt: skip
    return certificate.save(says)


def test_the_stored_plan_is_taken_where_nobody_names_a_method(home):
    chosen = pykvedge.plan("snapkv", 0.25)
    path = certify(chosen)
    with pykvedge.load(threads=THREADS) as loaded:
        with pykvedge.Session(loaded) as session:
            answer = session.ask("What is the code?", SCENE)
            "".join(answer)
            assert session.plan == chosen and any("tuned: snapkv at 0.25" in note for note in answer.report.notes)
        with pykvedge.Session(loaded) as session:
            session.set_plan(pykvedge.plan("h2o"))
            answer = session.ask("What is the code?", SCENE)
            assert answer.report.method == "h2o" and not any("tuned" in note for note in answer.report.notes)
        with pykvedge.Session(loaded, plan=pykvedge.plan("h2o")) as session:
            assert session.plan.method == "h2o"
    assert tuned.plan_or_default(MODEL, 0.1)[0] == pykvedge.plan("snapkv", 0.1)
    certify(pykvedge.plan("full"), met=False)
    assert tuned.plan_or_default(MODEL, 0.1)[0] == pykvedge.default_plan(0.1)
    assert tuned.plan_or_default(MODEL)[0].method == "full"
    certify(pykvedge.plan("kvzip"))
    assert tuned.plan_or_default(MODEL, second_pass=False)[0] == pykvedge.default_plan()
    path.unlink()
    assert tuned.plan_or_default(MODEL) == (pykvedge.default_plan(), "")


def test_a_model_that_changed_is_not_tuned(home):
    certify(pykvedge.plan("snapkv", 0.25))
    changed = home / "changed.gguf"
    data = bytearray(MODEL.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    assert tuned.find(MODEL) is not None and tuned.find(changed) is None


def test_a_certificate_whose_profile_changed_or_that_is_damaged_is_not_taken(home):
    path = certify(pykvedge.default_plan())
    shipped = profiles.find(pykvedge.default_plan(), MODEL)["allocator"]
    own = pykvedge.plans.profile.Profile(shipped.kind, shipped.values[:, ::-1], (), shipped.model_hash, 1, {})
    place = profiles.folder() / profiles.file_name(shipped.kind, shipped.model_hash)
    pykvedge.plans.profile.save(own, place)
    plan, line = tuned.plan_or_default(MODEL)
    assert plan == pykvedge.default_plan() and "the profile of the tuned plan has changed" in line
    place.unlink()
    assert tuned.plan_or_default(MODEL)[1].startswith("tuned: kvedge at 0.5")
    says = json.loads(path.read_text())
    says["plan"] = json.loads(pykvedge.plan("sparsemm").to_json())  # no profile exists here
    path.write_text(json.dumps(says))
    assert tuned.plan_or_default(MODEL)[0] == pykvedge.default_plan()
    certify(pykvedge.default_plan())
    for text in ("{", "{}", '{"kvedge_tuned": 2}', path.read_text().replace('"modal"', '"gone"')):
        path.write_text(text)
        with pytest.raises(ProfileError, match=r"kvedge tune"):
            tuned.find(MODEL)


def test_the_program_says_which_plan_it_takes(kvedge, home):
    where = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
    certify(pykvedge.plan("snapkv", 0.25))
    done = kvedge("chat", "--image", SCENE, "What is the code?", env=where)
    assert done.code == 0 and done.err.startswith("kvedge: tuned: snapkv at 0.25 keeps 99.5 % agreement (99.1 to 99.8)")
    assert kvedge("tune", "--list", env=where).out.startswith("demo-model.gguf: tuned: snapkv at 0.25")
    kvedge("tune", "--show", "--html", home, env=where).failed(2, f"--html {home} is a folder")
    assert kvedge("tune", "--remove", env=where).code == 0
    gone = kvedge("tune", "--show", env=where)
    assert gone.code == 1 and "is not tuned" in gone.err
