"""Models by name, from a local hub: fetched, resumed, checked, found again, refused, and removed."""

import dataclasses
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from hubs import HEADERS, MMPROJ, MODEL, REPO, fresh_place, in_parts, resolve
from hubserver import Faults, HubServer
from threads import in_threads
from waits import until

import pykvedge
from pykvedge import HubError, ModelError, UnknownNameError, UnreachableError, UsageError
from pykvedge.models.gguf import header_of, read_header
from pykvedge.models.hub import fetching, remote
from pykvedge.models.hub.folders import Folder


@pytest.fixture(scope="module")
def server():
    with HubServer() as hub:
        yield hub


@pytest.fixture
def place(server, tiny, tmp_path, monkeypatch):
    return fresh_place(server, tiny("llava"), tmp_path / "hf", monkeypatch)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetched(place, path):
    """Returns the sent bytes of a file beyond those of its header."""
    return place.hub.sent[path] - HEADERS // 2


# ------------------------------------------------------------------------------------------------- finding


def test_a_pair_is_fetched_into_the_layout_that_others_know(place, tiny):
    pair, model = resolve(), place.hub.repos[REPO][MODEL].data
    assert pair.model.read_bytes() == model and pair.mmproj.read_bytes() == tiny("llava").mmproj.read_bytes()
    commit = place.hub.commit(REPO)
    assert pair.model == place.folder / "snapshots" / commit / MODEL
    assert place.blobs() == {sha256(pair.model), sha256(pair.mmproj)}
    assert pair.model.resolve() == (place.folder / "blobs" / sha256(pair.model)).resolve()
    assert (place.folder / "refs" / "main").read_text() == commit
    assert not place.hub.strayed and place.hub.bytes_sent == len(model) + pair.mmproj.stat().st_size + HEADERS


def test_huggingface_hub_finds_what_was_fetched_and_the_other_way_round(place, tmp_path, monkeypatch):
    import huggingface_hub

    cache = place.home / "hub"
    pair = resolve()
    found = huggingface_hub.hf_hub_download(REPO, MODEL, cache_dir=cache, local_files_only=True)
    assert found == str(pair.model)
    scanned = huggingface_hub.scan_cache_dir(cache)
    assert not scanned.warnings and scanned.size_on_disk == pair.model.stat().st_size + pair.mmproj.stat().st_size

    monkeypatch.setenv("HF_HOME", str(tmp_path / "other"))
    for path in (MODEL, MMPROJ):
        huggingface_hub.hf_hub_download(REPO, path, cache_dir=tmp_path / "other" / "hub", endpoint=place.hub.url)
    place.asked()
    again = resolve(offline=True)
    assert again.model.is_relative_to(tmp_path / "other") and again.mmproj.read_bytes() == pair.mmproj.read_bytes()
    assert resolve() == again and len(place.asked()) == 1


def test_what_is_in_the_cache_is_not_fetched_again(place):
    pair, sent = resolve(), place.hub.bytes_sent
    place.asked()
    assert resolve(f"{REPO}:q4_k_m") == pair
    assert place.asked() == [("GET", f"/api/models/{REPO}/revision/main", None)]
    assert resolve(offline=True) == pair and place.asked() == []
    assert place.hub.bytes_sent == sent


def test_a_model_in_parts_answers_as_the_whole_does(place, tiny, tmp_path, native):
    whole = tiny("llama").model
    parts = in_parts(whole, tmp_path)
    assert len(parts) == 3
    for path in reversed(parts):
        place.hub.add("tiny/parted", f"sub/{path.name}", path.read_bytes())
    pair = resolve("tiny/parted")
    assert pair.mmproj is None and sorted(path.name for path in pair.model.parent.iterdir()) == [p.name for p in parts]
    assert resolve("tiny/parted:q8_0", offline=True) == pair
    assert pykvedge.hub.headers("tiny/parted")[0].tensors.keys() == read_header(whole).tensors.keys()
    (model,), _ = pykvedge.hub.cached_models()
    assert model.name == "tiny/parted:Q8_0" and model.bytes == sum(path.stat().st_size for path in parts)
    answers = []
    for path in (whole, pair.model):
        with pykvedge.Session(path, plan=pykvedge.plan("full"), threads=1) as session:
            answers.append(session.ask("Hello there?", sampling=pykvedge.Sampling(max_tokens=8)).read())
    assert answers[0] == answers[1] != ""


def test_offline_wants_what_is_there(place, monkeypatch):
    with pytest.raises(HubError, match=f"{REPO} is not in the cache"):
        resolve(offline=True)
    resolve()
    with pytest.raises(UnknownNameError, match="Q4_K_M"):
        resolve(f"{REPO}:Q8_0", offline=True)
    place.asked()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve().model.name == MODEL and place.asked() == []


def test_a_file_that_a_new_commit_leaves_as_it_was_is_not_fetched_again(place):
    first = resolve()
    place.hub.add(REPO, "mmproj-llava-q8_0.gguf", place.hub.repos[REPO][MMPROJ].data)
    place.hub.sent.clear()
    second = resolve()
    assert second.model.parent != first.model.parent and second.model.read_bytes() == first.model.read_bytes()
    assert second.mmproj.name == "mmproj-llava-q8_0.gguf" and place.hub.bytes_sent == 0
    del place.hub.repos[REPO]["mmproj-llava-q8_0.gguf"]
    assert resolve(mmproj=MMPROJ, offline=True).mmproj == first.mmproj  # only the older commit has this file


def test_offline_takes_the_file_of_the_newest_update(place):
    first = resolve()
    place.hub.add(REPO, MODEL, place.hub.repos[REPO][MODEL].data + b"\0")
    second = resolve()
    assert second.model.parent != first.model.parent
    os.utime(first.model.parent, (2e9, 2e9))  # changed last, as by a download of another file of this commit
    assert resolve(offline=True).model == second.model
    folder, third = Folder.of(REPO), "c" * 40
    (folder.path / "snapshots" / third).mkdir()
    os.utime(folder.path / "snapshots" / third, (1e9, 1e9))
    assert folder.commits() == [second.model.parent.name, first.model.parent.name, third]


def test_a_hub_that_cannot_be_reached_is_replaced_by_the_cache(place, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        resolve()
    monkeypatch.setenv("HF_ENDPOINT", place.hub.url)
    place.hub.faults.silent_listing = True
    with pytest.raises(UnreachableError, match="does not answer like a hub"):
        resolve()
    place.hub.faults.silent_listing = False
    pair, lines = resolve(), []
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve(warn=lines.append) == pair
    assert len(lines) == 1 and "using the model in the cache" in lines[0]
    with pytest.raises(UnreachableError):
        resolve(f"{REPO}:Q8_0", warn=lines.append)  # this quant does not exist
    monkeypatch.setenv("HF_ENDPOINT", "ftp://127.0.0.1")
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        resolve()


@pytest.mark.parametrize("variable", ["LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_the_folder_is_the_one_that_llama_cpp_takes(place, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert resolve().model.is_relative_to(tmp_path / "elsewhere" / place.folder.name)
    assert not place.home.exists()


def test_only_headers_are_fetched_where_only_headers_are_asked_for(place, tiny, monkeypatch):
    found, own = pykvedge.hub.headers(REPO), tiny("llava")
    for header, path, name in zip(found, (own.model, own.mmproj), (MODEL, MMPROJ), strict=True):
        assert header == dataclasses.replace(read_header(path), path=header.path)
        assert str(header.path) == f"{REPO}/{name}"
    assert place.hub.bytes_sent == HEADERS and not place.folder.exists()
    monkeypatch.setattr(remote, "_BEGINNINGS", (1000, 8000, 1 << 20))  # fetches only as much as the header needs
    assert pykvedge.hub.headers(REPO) == found
    resolve()
    assert [header.architecture for header in pykvedge.hub.headers(REPO, offline=True)] == ["llama", "clip"]


def test_a_part_of_a_header_is_told_from_a_damaged_one(tiny):
    path = tiny("llava").model
    data = path.read_bytes()
    for n in range(0, read_header(path).data_start - 32, 991):
        assert header_of(path, data[:n], len(data)) is None
        with pytest.raises(ModelError, match=r"damaged or truncated|not a GGUF file"):
            header_of(path, data[:n], n)


# ------------------------------------------------------------------------------------------------- fetching


def test_a_connection_that_breaks_is_taken_up_where_it_broke(place):
    place.hub.faults.cut = [200_000, 900_000, 0, 1_000_000]
    pair = resolve()
    assert sha256(pair.model) in place.blobs()
    assert fetched(place, MODEL) == pair.model.stat().st_size and fetched(place, MMPROJ) == pair.mmproj.stat().st_size
    assert any(asked == "bytes=200000-" for _, _, asked in place.hub.requests)


def test_a_connection_that_brings_nothing_is_not_tried_for_ever(place):
    place.hub.faults.cut = [100_000] + [0] * 50
    with pytest.raises(UnreachableError):
        resolve()
    assert len(place.hub.faults.cut) > 40 and any(name.endswith(".incomplete") for name in place.blobs())
    place.hub.faults.cut = []
    place.asked()
    pair = resolve()
    assert any(asked == "bytes=100000-" for _, _, asked in place.asked())
    assert place.blobs() == {sha256(pair.model), sha256(pair.mmproj)}


def test_a_kill_in_the_middle_costs_nothing_that_was_there(place, environment):
    place.hub.faults.hold = threading.Event()
    code = f"import pykvedge; pykvedge.hub.resolve({REPO!r}, mmproj='none')"
    child = subprocess.Popen([sys.executable, "-c", code], env={**environment, **place.env})
    assert place.hub.halfway.wait(60)
    size = place.hub.repos[REPO][MODEL].data
    begun = next((place.folder / "blobs").glob("*.incomplete"))
    until(lambda: begun.stat().st_size >= len(size) // 4)
    os.kill(child.pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    child.wait()
    place.hub.faults.hold.set()
    there = begun.stat().st_size
    assert 0 < there < len(size) and len(place.blobs()) == 1
    with pytest.raises(HubError):
        resolve(offline=True)
    place.asked()
    pair = resolve(mmproj="none")
    assert pair.model.read_bytes() == size and place.blobs() == {sha256(pair.model)}
    assert [asked for _, path, asked in place.asked() if path.startswith("/storage")][-1] == f"bytes={there}-"


def test_a_server_without_ranges_sends_all_of_it_again(place):
    place.hub.faults.no_ranges, place.hub.faults.cut = True, [200_000, 800_000]
    pair = resolve(mmproj="none")
    assert pair.model.read_bytes() == place.hub.repos[REPO][MODEL].data


@pytest.mark.parametrize("fault", [{"shifted": 1000}, {"past_the_end": True}])
def test_a_server_that_does_not_send_the_rest_is_asked_for_all_of_it(place, fault):
    place.hub.faults = Faults(cut=[200_000], **fault)
    pair = resolve(mmproj="none")
    assert pair.model.read_bytes() == place.hub.repos[REPO][MODEL].data
    assert any(asked == "bytes=200000-" for _, _, asked in place.hub.requests)
    assert place.blobs() == {sha256(pair.model)}


def test_a_wrong_checksum_leaves_nothing(place):
    for path, wrong in ((MODEL, "a" * 64), (MMPROJ, "b" * 64)):
        own = place.hub.repos[REPO][path]
        own.said = wrong
        with pytest.raises(
            HubError, match=f"the download of .*{path} is damaged .*: its checksum is .*, not {wrong[:12]}"
        ):
            resolve()
        assert wrong not in "".join(place.blobs())
        own.said = None
    assert sha256(resolve().model) in place.blobs()


def test_a_file_that_is_not_in_large_file_storage_has_a_checksum_too(place):
    file = place.hub.repos[REPO][MMPROJ]
    file.large = False
    pair = resolve()
    assert pair.mmproj.resolve().name == file.checksum and len(file.checksum) == 40
    shutil.rmtree(place.folder)
    file.said = "0" * 40
    with pytest.raises(HubError, match="is damaged and was removed"):
        resolve()


def test_more_bytes_than_the_hub_says_are_not_taken(place):
    place.hub.repos[REPO][MODEL].size = 2_000_000
    with pytest.raises(ModelError, match="damaged or truncated"):  # found by the header: its tensors end after the file
        resolve(mmproj="none")
    file = fetching.RemoteFile(MODEL, 100_000, "a" * 64)
    hub, folder = fetching.Hub(), fetching.Folder.of(REPO)
    with pytest.raises(HubError, match="sends more"):
        fetching.fetch(hub, folder, place.hub.commit(REPO), file, lambda n: None)


def test_a_copy_that_is_not_whole_makes_way(place):
    """As after copying a folder without links to a full disk."""
    pair = resolve()
    whole, blob = pair.model.read_bytes(), pair.model.resolve()
    for there in (True, False):  # whether the link's target exists
        pair.model.unlink()
        pair.model.write_bytes(whole[:1000])
        if not there:
            blob.unlink()
        assert resolve() == pair and pair.model.read_bytes() == whole


def test_two_that_want_the_same_fetch_it_once(place):
    pairs = []
    in_threads(*[lambda: pairs.append(resolve(mmproj="none"))] * 3)
    assert len(set(pairs)) == 1 and len(pairs) == 3
    assert place.hub.sent[MODEL] <= pairs[0].model.stat().st_size + 3 * HEADERS // 2


def test_it_can_be_cancelled_and_goes_on_later(place):
    cancel, shares = threading.Event(), []

    def progress(what, share):
        shares.append(share)
        if what.startswith(f"downloading {MODEL}") and share > 0.5:
            cancel.set()

    with pytest.raises(pykvedge.CancelledError):
        resolve(progress=progress, cancel=cancel)
    begun = next((place.folder / "blobs").glob("*.incomplete")).stat().st_size
    assert begun > 0 and shares == sorted(shares)
    place.asked()
    resolve()
    assert any(asked == f"bytes={begun}-" for _, _, asked in place.asked())


# ------------------------------------------------------------------------------------------------- refusals


def test_tokens_are_sent_to_the_hub_alone(place, monkeypatch):
    place.hub.faults.token = "hf_" + "x" * 34
    with pytest.raises(HubError, match="set HF_TOKEN"):
        resolve()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="the token in HF_TOKEN is not valid"):
        resolve()
    monkeypatch.setenv("HF_TOKEN", "hf_\u00e9")
    with pytest.raises(UsageError, match="HF_TOKEN is invalid"):
        resolve()
    monkeypatch.setenv("HF_TOKEN", place.hub.faults.token)
    assert resolve().model.is_file()
    assert place.hub.strayed == []


@pytest.mark.parametrize(("status", "words"), [(403, "with this HF_TOKEN"), (404, "has no"), (410, "status 410")])
def test_files_that_are_denied(place, status, words):
    place.hub.faults.statuses = [status] * 3
    with pytest.raises(HubError, match=words):
        resolve()


def test_a_home_that_is_no_folder(place, kvedge, tmp_path):
    (tmp_path / "home").write_text("a file")
    env = {**place.env, "HF_HOME": str(tmp_path / "home")}
    kvedge("pull", REPO, env=env).failed(1, str(tmp_path / "home"), "HF_HOME")


def test_repositories_and_quantisations_that_are_not_there(place):
    with pytest.raises(HubError, match="has no repository tiny/nothing"):
        resolve("tiny/nothing")
    with pytest.raises(UnknownNameError, match="available: Q4_K_M"):
        resolve(f"{REPO}:Q5_K_M")
    place.hub.add("tiny/empty", "README.md", b"", large=False)
    with pytest.raises(HubError, match="tiny/empty has no GGUF model"):
        resolve("tiny/empty")
    assert place.hub.bytes_sent == 0


def test_what_is_refused_and_in_the_cache_is_named_there(place):
    resolve()
    place.hub.faults.token = "hf_" + "x" * 34
    with pytest.raises(HubError, match=r"set HF_TOKEN .* use --offline, because the model is in the cache"):
        resolve()
    with pytest.raises(HubError, match=r"gated$"):
        resolve(f"{REPO}:Q8_0")
    assert resolve(offline=True).model.is_file()


def test_a_pair_that_does_not_belong_together_is_refused_by_its_headers(place, tiny):
    place.hub.add(REPO, MMPROJ, tiny("qwen2vl").mmproj.read_bytes())
    with pytest.raises(ModelError, match=f"{REPO}/{MMPROJ} .* use the mmproj that belongs to this model"):
        resolve()
    assert place.hub.bytes_sent <= HEADERS and not place.folder.exists()
    assert place.hub.bytes_sent < len(place.hub.repos[REPO][MODEL].data) / 10
    place.hub.add(REPO, MODEL, tiny("llava").mmproj.read_bytes())
    with pytest.raises(ModelError, match="is an image encoder"):
        resolve()


def test_files_that_are_no_models_are_refused_by_their_beginnings(place, monkeypatch):
    place.hub.add(REPO, MODEL, b"<html>" + bytes(1_000_000))
    with pytest.raises(ModelError, match=f"{REPO}/{MODEL} is not a GGUF file"):
        resolve()
    # a header that states endless metadata
    counts = (1).to_bytes(8, "little") + (10**6).to_bytes(8, "little")
    place.hub.add(REPO, MODEL, b"GGUF\3\0\0\0" + counts + bytes(1 << 20))
    monkeypatch.setattr(remote, "_BEGINNINGS", (100_000, 300_000))
    with pytest.raises(ModelError, match="its header is larger than"):
        resolve()
    assert place.hub.bytes_sent <= 3 * 300_000 and not place.folder.exists()


def test_a_disk_without_room_is_found_before_anything_is_fetched(place, monkeypatch):
    usage = shutil.disk_usage(place.home.parent)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(HubError, match=r"needs 3\.6 MiB in .*, but only 1\.0 MiB are free"):
        resolve()
    assert place.hub.bytes_sent == 0


def test_a_disk_that_is_full_in_the_middle_keeps_what_has_come(place, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(fetching.os, "fsync", full)
        with pytest.raises(HubError, match="cannot be written: No space left on device; set HF_HUB_CACHE to another"):
            resolve()
    assert len(place.blobs()) == 1 and place.blobs().pop().endswith(".incomplete")
    assert resolve().mmproj.is_file()


@pytest.mark.parametrize("path", ["../../../escaped.gguf", "/escaped.gguf", "a\r\nb.gguf"])
def test_a_repository_with_hostile_paths_is_refused(place, path):
    place.hub.add(REPO, path, b"GGUF")
    with pytest.raises(HubError, match="points outside the repository"):
        resolve()
    assert place.hub.bytes_sent == 0


def test_a_checksum_or_commit_that_is_a_path_is_refused(place, monkeypatch):
    place.hub.repos[REPO][MODEL].said = "../../../escaped"
    with pytest.raises(HubError, match="no size or checksum"):
        resolve()
    place.hub.repos[REPO][MODEL].said = None
    monkeypatch.setattr(place.hub, "commit", lambda repo: "../escaped")
    with pytest.raises(HubError, match="gives no commit"):
        resolve()


def test_a_snapshot_that_leads_out_of_the_cache_is_refused(place, tmp_path, tiny):
    pair = resolve()
    pair.model.unlink()
    pair.model.symlink_to(tiny("llava").model)
    with pytest.raises(HubError, match="a link to a place outside the cache"):
        resolve(offline=True)
    models, problems = pykvedge.hub.cached_models()
    assert models == [] and len(problems) == 1 and "a link to a place outside the cache" in problems[0]
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(place.folder)
    (place.folder / "snapshots" / place.hub.commit(REPO)).parent.mkdir(parents=True)
    (place.folder / "snapshots" / place.hub.commit(REPO)).symlink_to(outside)
    (place.folder / "blobs").symlink_to(outside)
    with pytest.raises(HubError, match="a link to a place outside the cache"):
        resolve()
    assert list(outside.iterdir()) == []


# ------------------------------------------------------------------------------------------------- removing


def test_one_quantisation_goes_and_what_others_use_stays(place):
    place.hub.add(REPO, "llava-Q8_0.gguf", place.hub.repos[REPO][MODEL].data + b"\0")
    place.hub.add(REPO, "llava-F16.gguf", place.hub.repos[REPO][MODEL].data)  # the same content as Q4_K_M
    first, *_ = [resolve(f"{REPO}:{quant}") for quant in ("Q4_K_M", "Q8_0", "F16")]
    assert [m.quant for m in pykvedge.hub.cached_models()[0]] == ["F16", "Q4_K_M", "Q8_0"]
    eight = pykvedge.hub.remove(f"{REPO}:q8_0")
    assert eight.files == ["llava-Q8_0.gguf"] and eight.bytes == first.model.stat().st_size + 1
    eight.run()
    four = pykvedge.hub.remove(f"{REPO}:Q4_K_M")
    assert four.files == [MODEL] and four.bytes == 0  # F16 has the same content
    four.run()
    assert resolve(f"{REPO}:F16", offline=True).mmproj.is_file()
    with pytest.raises(UnknownNameError):
        resolve(f"{REPO}:Q8_0", offline=True)
    last = pykvedge.hub.remove(f"{REPO}:F16")
    assert set(last.files) == {"llava-F16.gguf", MMPROJ}
    last.run()
    assert place.blobs() == set() and pykvedge.hub.cached_models() == ([], [])
    assert not (place.folder / "snapshots").exists()  # nor the folders of the names


def test_a_quantisation_of_two_words_goes_by_both_names(place):
    for name in ("UD-Q4_K_XL", "Q4_K_XL"):
        place.hub.add(REPO, "llava-UD-Q4_K_XL.gguf", place.hub.repos[REPO][MODEL].data)
        resolve(f"{REPO}:{name}")
        found = pykvedge.hub.remove(f"{REPO}:{name.lower()}")
        assert "llava-UD-Q4_K_XL.gguf" in found.files
        found.run()
    assert pykvedge.hub.cached_models() == ([], [])


def test_a_repository_goes_with_all_that_was_begun(place, tmp_path):
    resolve()
    (place.folder / "blobs" / ("c" * 64 + ".incomplete")).write_bytes(b"begun")
    found = pykvedge.hub.remove(REPO)
    assert found.whole and set(found.files) == {MODEL, MMPROJ}
    assert found.bytes >= sum(path.stat().st_size for path in (place.folder / "blobs").iterdir())
    found.run()
    assert not place.folder.exists()
    with pytest.raises(HubError, match="is not in the cache"):
        pykvedge.hub.remove(REPO)
    for name in ("../hf:Q4", "tiny"):
        with pytest.raises(UsageError):
            pykvedge.hub.remove(name)


def test_removing_goes_through_no_link(place, tmp_path):
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("x")
    place.folder.parent.mkdir(parents=True)
    place.folder.symlink_to(outside)
    with pytest.raises(HubError, match="cannot be removed"):
        pykvedge.hub.remove(REPO).run()
    assert (outside / "file").read_text() == "x"
