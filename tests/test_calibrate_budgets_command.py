"""kvedge calibrate budgets as a command: the demo model, a second run around the first, texts, bad requests."""

import json

import pytest
from click.testing import CliRunner

from kvedge_lab.calibrate.exchange import FLOOR
from kvedge_lab.calibrate.samples import SEED
from kvedge_lab.commands.calibrate import calibrate
from pykvedge.errors import NothingToCompressError, UsageError
from pykvedge.plans import profile


def test_calibrating_the_demo_model(kvedge, tmp_path):
    where = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    arguments = ["calibrate", "budgets", "--samples", 2, "--points", 3, "--threads", 1]
    done = kvedge(*arguments, env=where)
    assert done.code == 0 and "percent of an even share" in done.out and "60 measurements, about" in done.err, done
    [path] = tmp_path.rglob("*.json")  # the user's folder, where chat finds profiles
    made = profile.load(path)
    assert made.kind == "head-budgets" and made.values.shape == (5, 2) and made.samples == 2
    assert made.values.sum() == pytest.approx(1, abs=1e-4) and made.values.min() >= FLOOR / 10 - 1e-5
    command = made.about["made"]["command"]
    assert command.startswith("kvedge calibrate budgets --samples 2 --points 3") and command.endswith(f"--seed {SEED}")
    again = kvedge(*arguments, "--quiet", "--json", "--output", tmp_path / "again.json", env=where)
    assert again.err == "" and again.json["profile"]["values"] == json.loads(path.read_text())["values"]


def test_a_second_run_is_around_the_first_ones_profile(kvedge, tmp_path, tiny):
    once, losses, twice = tmp_path / "once.json", tmp_path / "losses.jsonl", tmp_path / "twice.json"
    arguments = ["calibrate", "budgets", "--samples", 1, "--points", 3, "--threads", 1, "--quiet"]
    assert kvedge(*arguments, "--output", once).code == 0
    arguments += ["--set", "scorer.window=16", "--around", once, "--save", losses, "--output", twice]
    assert kvedge(*arguments).code == 0
    first, made = profile.load(once), profile.load(twice)
    assert made.about["made"]["command"].endswith(f"--seed {SEED} --set scorer.window=16 --around once.json")
    found = 2 * made.values - first.values  # half of the outcome
    assert made.values.sum() == pytest.approx(1, abs=1e-4) and found.min() >= FLOOR / 10 - 1e-5
    assert json.loads(losses.read_text().splitlines()[0])["around"] == first.values.tolist()
    kvedge(*arguments, "--resume", "--around", twice).failed(2, "was measured with around")
    other = ["calibrate", "budgets", *tiny("llama").arguments(), "--around", once, "--quiet"]
    kvedge(*other).failed(2, "was made for 'demo-model.gguf', not for the weights in")
    kvedge(*arguments[:-6], "--around", tmp_path / "none.json").failed(2, "none.json cannot be read")


QUESTION = "What is the code of a star that no image shows, and of which nobody has ever heard anything? "


def calibrated(files, folder, *arguments):
    """Runs the command on a text without pictures."""
    data, out = folder / "own.jsonl", folder / "out.json"
    data.write_text(json.dumps({"question": 4 * QUESTION, "answer": "None at all."}) + "\n")
    arguments = ["budgets", *files.arguments(), "--points", 2, "--data", data, "--output", out, "--quiet", *arguments]
    return CliRunner().invoke(calibrate, [str(x) for x in arguments]), out


@pytest.mark.parametrize("scorer", ["mixkv", "expected", "mean"])
def test_sliding_windows_keep_no_share(native, tiny, tmp_path, scorer):
    """Sliding-window layers of gemma3 stay with llama.cpp, which keeps all their rows."""
    run, out = calibrated(tiny("gemma3"), tmp_path, "--scorer", scorer)
    assert run.exit_code == 0, run
    made = profile.load(out)
    stored = made.values.any(axis=1)
    assert made.samples == 1 and made.about["made"]["data"] == "own.jsonl"
    assert 0 < stored.sum() < len(stored)


def test_models_without_anything_to_compress_are_refused(native, tiny, tmp_path):
    run, out = calibrated(tiny("deepseek2"), tmp_path)
    assert isinstance(run.exception, NothingToCompressError) and not out.exists()


def test_images_are_not_passed_over_where_there_is_no_encoder(native, tiny):
    run = CliRunner().invoke(calibrate, ["budgets", *map(str, tiny("llama").arguments()), "--samples", "1"])
    assert isinstance(run.exception, UsageError) and "--mmproj" in str(run.exception)


def test_prompts_that_are_kept_whole_make_no_profile(native, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("test_calibrate_budgets_command.QUESTION", "?")
    run, out = calibrated(tiny("llama"), tmp_path, "--scorer", "window")
    assert "do not change the answers" in str(run.exception) and not out.exists()


@pytest.mark.parametrize(("arguments", "words"), [
    (["--samples", "0"], ["--samples must be at least 1"]), (["--points", "1"], ["--points must be 2 to 1000"]),
    (["--scorer", "windw"], ["did you mean 'window'"]), (["--baseline", "0"], ["--baseline must be a share"]),
    (["--baseline", "nan"], ["--baseline must be a share"]), (["--targets", "0.1,1.5"], ["targets must be shares"]),
    (["--targets", "some"], ["--targets must be shares"]), (["--seed", "-1"], ["--seed must be at least 0"]),
    (["--questions", "0"], ["--questions must be 1 to 3"]), (["--method", "kvedg"], ["did you mean 'kvedge'"]),
    (["--compress", "prompt"], ["--compress must be conversation, context, or both"]),
    (["--data", "/nowhere/none.jsonl"], ["none.jsonl", "No such file"]), (["--resume"], ["--save FILE"]),
    (["--set", "scorer.widow=4"], ["unknown setting 'scorer.widow'"]), (["--set", "window"], ["--set"]),
    (["--set", "allocator.floor=0.5"], ["allocator 'uniform' has no setting"]),
])  # fmt: skip
def test_bad_requests(refused, arguments, words):
    refused("calibrate", "budgets", *arguments).failed(2, *words)
