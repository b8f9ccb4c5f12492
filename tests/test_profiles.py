"""Profile files: writing and reading, the model of a profile, the places of files, refused files."""

import json
import math
import os
import shutil

import numpy as np
import pytest

import pykvedge
from pykvedge import Plan, Profile, ProfileError
from pykvedge.models import profiles
from pykvedge.plans import profile

DATA = profiles.SHIPPED.parent
DEMO = DATA / "demo-model.gguf"
SPARSEMM = pykvedge.plan("sparsemm")
HEADS = {
    "kvedge_profile": 1, "kind": "visual-heads", "model": {"hash": "sampled-sha256:ab"}, "samples": 3,
    "values": [[0, 1.5], [2, 0.25]],
}  # fmt: skip


def written(tmp_path, data):
    path = tmp_path / "profile.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_profiles_survive_their_file(tmp_path):
    about = {"model": {"name": "a.gguf"}, "made": {"command": "kvedge calibrate heads"}}
    for made in (
        Profile("retrieval-heads", np.array([[0.0, 1 / 3], [2e-5, 7]]), (), "sampled-sha256:ab", 5, about),
        Profile("prefix", np.array([[0.1, 0.25], [0, 1]]), (0.2, 0.5), "sampled-sha256:cd", 2, about),
        Profile("key-redundancy", np.array([[0.0], [1.0]]), (), "sampled-sha256:ef", 1, about),
        Profile("key-redundancy", np.zeros((2, 1)), (), "sampled-sha256:ef", 1, about),  # no similar keys
        Profile("head-budgets", np.array([[1 / 3, 0], [1 / 6, 0.5]]), (), "sampled-sha256:ef", 1, about),
    ):
        path = tmp_path / "folder" / "p.json"
        profile.save(made, path)
        read = profile.load(path)
        assert is_close(made, read) and read.about == about and read.samples == made.samples
        assert list(path.parent.iterdir()) == [path]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    made = Profile.from_json(json.dumps(HEADS))
    profile.save(made, path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError, match="cannot be written: No space left"):
        profile.save(made, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def is_close(a, b):
    """Returns whether two profiles are equal, up to the digits of a file."""
    same = a.kind == b.kind and a.model_hash == b.model_hash and a.values.shape == b.values.shape
    return same and bool(np.allclose(a.values, b.values, rtol=1e-5)) and math.isclose(sum(a.budgets), sum(b.budgets))


@pytest.mark.parametrize(("changed", "says"), [
    ({"kvedge_profile": 2}, "does not have version 1"), ({"kind": "heads"}, "one of visual-heads"),
    ({"kind": 7}, "one of"), ({"model": None}, "does not name its model"),
    ({"model": {"hash": ""}}, "does not name"), ({"model": {}}, "does"),
    ({"samples": 0}, "no valid fields"), ({"samples": True}, "no valid fields"), ({"made": []}, "no valid fields"),
    ({"values": []}, "one row for each layer"), ({"values": [[1], [1, 2]]}, "one row"), ({"values": [[]]}, "one row"),
    ({"values": [[1, "2"]]}, "rows of numbers"), ({"values": [[True, 1]]}, "rows of"), ({"values": 3}, "one row"),
    ({"values": [[1, -1]]}, "not negative"), ({"values": [[1, float("nan")]]}, "finite"),
    ({"values": [[1, float("inf")]]}, "finite"), ({"values": [[1, 1e300]]}, "finite"),
    ({"values": [[0, 0]]}, "score above 0"),
    ({"values": [[1, 10**400]]}, "too large"), ({"values": None}, "one row"), ({"values": {"0": [1]}}, "one row"),
    ({"budgets": [0.1, 0.2]}, "no budgets"), ({"kind": "prefix"}, "for budgets"),
    ({"kind": "prefix", "budgets": [0.5, 0.2], "values": [[0.1, 0.2]]}, "ascending"),
    ({"kind": "prefix", "budgets": [0.2, 0.5], "values": [[0.1, 1.2]]}, "shares up to 1"),
    ({"kind": "prefix", "budgets": [0.0, 0.5], "values": [[0.1, 0.2]]}, "ascending"),
    ({"kind": "key-redundancy"}, "up to 1"), ({"kind": "key-redundancy", "values": [[-0.1]]}, "not negative"),
    ({"kind": "key-redundancy", "values": [[0.5]], "budgets": [0.2]}, "no budgets"),
    ({"kind": "head-budgets", "values": [[0, 0]]}, "add up to 1"), ({"kind": "head-budgets"}, "add up to 1"),
    ({"kind": "head-budgets", "values": [[0.5, 0.5]], "budgets": [0.2, 0.5]}, "no budgets"),
    ({"kind": "head-budgets", "values": [[1.5, -0.5]]}, "not negative"),
    ({"kind": "prefix", "budgets": "all", "values": [[0.1, 0.2]]}, "rows of numbers"),
])  # fmt: skip
def test_damaged_and_hostile_profiles_are_refused(tmp_path, changed, says):
    path = written(tmp_path, {**HEADS, **changed})
    with pytest.raises(ProfileError, match=says) as caught:
        profile.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "says"), [
    ("", "not JSON"), ("[1, 2]", "not a profile"), ("{}", "not a profile"), ('{"kvedge_plan": 1}', "not a profile"),
    ("[" * 100_000, "not JSON"), ('{"kvedge_profile": 1', "not JSON"), ("\0" * 50, "not JSON"),
])  # fmt: skip
def test_files_that_are_no_profiles(tmp_path, text, says):
    with pytest.raises(ProfileError, match=says):
        profile.load(written(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ProfileError, match="No such file"):
        profile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        profile.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00GGUF")
    with pytest.raises(ProfileError, match="not UTF-8 text"):
        profile.load(tmp_path / "binary")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(profile.LARGEST_FILE + 1)
    with pytest.raises(ProfileError, match="too large"):
        profile.load(tmp_path / "large")


def test_the_hash_names_the_weights(tmp_path, tiny):
    model = tiny("llama").model
    same = tmp_path / "another name.gguf"
    shutil.copy(model, same)
    assert profiles.hash_of(same) == profiles.hash_of(model) != profiles.hash_of(tiny("qwen3").model)
    for at in (-1, -(model.stat().st_size // 3), 4000):  # one bit in the last tensor, another one, the vocabulary
        data = bytearray(model.read_bytes())
        data[at] ^= 1
        same.write_bytes(data)
        assert profiles.hash_of(same) != profiles.hash_of(model)


def test_of_a_large_file_a_sample_is_read(tmp_path, tiny):
    """The hash of a file beyond 4 MiB covers the header, the size and samples from beginning to end."""
    small = tiny("llama").model.read_bytes()
    large = tmp_path / "large.gguf"
    large.write_bytes(small + bytes(16 << 20))
    before = profiles.hash_of(large)
    with large.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    after = profiles.hash_of(large)
    large.write_bytes(small + bytes((16 << 20) + 1))
    assert len({before, after, profiles.hash_of(large)}) == 3


# Which profile a plan gets


def test_what_kvedge_ships_is_found_for_the_demo_model(own_folder):
    names = sorted(path.name for path in profiles.SHIPPED.iterdir())
    assert names == sorted(profiles.file_name(kind, profiles.hash_of(DEMO)) for kind in profile.KINDS)
    for method, kind in (("sparsemm", "visual-heads"), ("mixkv-headkv", "retrieval-heads")):
        found = profiles.find(pykvedge.plan(method), DEMO)["allocator"]
        assert found.kind == kind and found.values.shape == (5, 4) and found.samples == 50
        assert found.about["made"]["command"].startswith("kvedge calibrate heads --kind")
    plan = pykvedge.plan("prefixkv", **{"allocator.source": "profile"})
    found = profiles.find(plan, DEMO)["allocator"]
    assert found.values.shape == (5, len(found.budgets))
    assert profiles.find(pykvedge.plan("lookm"), DEMO) == {}


def test_the_users_own_comes_before_the_shipped_and_the_given_before_both(own_folder, tmp_path):
    mine = Profile("visual-heads", np.ones((5, 4)), (), profiles.hash_of(DEMO), 1, {})
    profile.save(mine, own_folder / profiles.file_name(mine.kind, mine.model_hash))
    assert is_close(profiles.find(SPARSEMM, DEMO)["allocator"], mine)
    other = Profile("retrieval-heads", np.eye(5, 4), (), mine.model_hash, 1, {})
    profile.save(other, tmp_path / "other.json")
    assert is_close(profiles.find(SPARSEMM, DEMO, tmp_path / "other.json")["allocator"], other)
    assert profiles.find(SPARSEMM, DEMO, other)["allocator"] is other


def test_a_profile_of_another_model_is_refused(own_folder, tiny, profile_file):
    model = tiny("llama").model
    with pytest.raises(ProfileError, match=r"needs a visual-heads profile of model.gguf.*`kvedge calibrate heads`"):
        profiles.find(SPARSEMM, model, None)
    shipped = profiles.SHIPPED / profiles.file_name("visual-heads", profiles.hash_of(DEMO))
    with pytest.raises(ProfileError, match=r"was made for 'demo-model.gguf', not for the weights in model.gguf"):
        profiles.find(SPARSEMM, model, shipped)
    # a copy under the expected name does not pass either
    own_folder.mkdir()
    shutil.copy(shipped, own_folder / profiles.file_name("visual-heads", profiles.hash_of(model)))
    with pytest.raises(ProfileError, match="was made for 'demo-model"):
        profiles.find(SPARSEMM, model, None)
    with pytest.raises(ProfileError, match="kind 'prefix' does not fit"):
        profiles.find(SPARSEMM, model, profile_file(model, "prefix"))


def test_a_plan_travels_without_its_profile():
    text = SPARSEMM.to_json()
    assert Plan.from_json(text) == SPARSEMM and "profile" not in text
    assert Plan.from_json(text).profile_kinds() == {"allocator": "visual-heads"}


def test_sessions_refuse_before_the_weights_are_read(own_folder, tiny, monkeypatch, native):
    model = tiny("llama")
    monkeypatch.setattr("pykvedge.chat.session.borrow", None)
    with pytest.raises(ProfileError, match="kvedge calibrate heads"):
        model.session(SPARSEMM)


def test_a_conversation_changes_to_a_method_with_a_profile(own_folder, tiny, profile_file, native):
    model = tiny("llama")
    with model.session(pykvedge.plan("h2o"), profile=profile_file(model.model, "visual-heads")) as session:
        session.ask("Good morning. " * 20).read()
        session.set_plan(pykvedge.plan("sparsemm", 0.6, **{"scorer.window": 4}))
        session.ask("And now something else, please. " * 8).read()
        lengths = [n for heads in session.engine.cache.lengths() for n in heads]
        assert len(set(lengths)) > 1
    with model.session(pykvedge.plan("h2o")) as session:
        with pytest.raises(ProfileError, match="kvedge calibrate heads"):
            session.set_plan(SPARSEMM)  # also before the first message
        session.ask("Hello").read()
        with pytest.raises(ProfileError, match="kvedge calibrate heads"):
            session.set_plan(SPARSEMM)
        assert session.plan.method == "h2o" and session.ask("Still there?").read() is not None


def test_chat_says_what_is_missing_and_what_is_not_needed(kvedge, tiny, tmp_path):
    arguments = ["chat", *tiny("llama").arguments(), "Hello"]
    empty = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    kvedge(*arguments, "--method", "sparsemm", env=empty).failed(2, "visual-heads", "`kvedge calibrate heads`")
    kvedge(*arguments, "--method", "headkv", env=empty).failed(2, "calibrate heads --kind retrieval")
    kvedge(*arguments, "--method", "lookm", "--profile", tmp_path / "x.json").failed(2, "lookm", "uses no profile")
    kvedge(*arguments, "--method", "sparsemm", "--profile", tmp_path / "x.json").failed(2, "x.json", "No such file")
    path = written(tmp_path, "{}")
    kvedge(*arguments, "--method", "sparsemm", "--profile", path).failed(2, str(path), "not a profile")
