"""What is refused of models by name, before it is fetched where that can be known; and what is removed of a cache."""

from __future__ import annotations

import errno
import shutil

import pytest
from hubs import HEADERS, MMPROJ, MODEL, REPO, fresh_place, resolve
from hubserver import HubServer

import pykvedge
from pykvedge import HubError, ModelError, UnknownNameError, UsageError
from pykvedge.models.gguf import header_of, read_header
from pykvedge.models.hub import fetching, prechecks


@pytest.fixture(scope="module")
def server():
    with HubServer() as hub:
        yield hub


@pytest.fixture
def place(server, tiny, tmp_path, monkeypatch):
    return fresh_place(server, tiny("llava"), tmp_path / "hf", monkeypatch)


def test_tokens_are_sent_to_the_hub_alone(place, monkeypatch):
    place.hub.faults.token = "hf_" + "x" * 34
    with pytest.raises(HubError, match="set HF_TOKEN"):
        resolve()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="HF_TOKEN is not valid there"):
        resolve()
    monkeypatch.setenv("HF_TOKEN", "hf_\u00e9")
    with pytest.raises(UsageError, match="HF_TOKEN is no token"):
        resolve()
    monkeypatch.setenv("HF_TOKEN", place.hub.faults.token)
    assert resolve().model.is_file()
    assert place.hub.strayed == []


@pytest.mark.parametrize(("status", "words"), [(403, "denies"), (404, "has no"), (410, "status 410")])
def test_files_that_are_denied(place, status, words):
    place.hub.faults.statuses = [status] * 3
    with pytest.raises(HubError, match=words):
        resolve()


def test_repositories_and_quantisations_that_are_not_there(place):
    with pytest.raises(HubError, match="has no tiny/nothing"):
        resolve("tiny/nothing")
    with pytest.raises(UnknownNameError, match="there are Q4_K_M"):
        resolve(f"{REPO}:Q5_K_M")
    place.hub.add("tiny/empty", "README.md", b"", large=False)
    with pytest.raises(HubError, match="tiny/empty has no GGUF model"):
        resolve("tiny/empty")
    assert place.hub.bytes_sent == 0


def test_what_is_refused_and_in_the_cache_is_named_there(place):
    resolve()
    place.hub.faults.token = "hf_" + "x" * 34
    with pytest.raises(HubError, match=r"set HF_TOKEN .* it is in the cache, where --offline finds it"):
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


def test_an_architecture_that_llama_cpp_does_not_know_is_refused_by_its_header(place, tiny):
    own = tiny("llava").model.read_bytes()
    length = (5).to_bytes(8, "little")
    place.hub.add(REPO, MODEL, own.replace(b"llama.", b"lxama.").replace(length + b"llama", length + b"lxama"))
    with pytest.raises(ModelError, match=f"{REPO}/{MODEL} cannot be used: .*unknown model architecture: 'lxama'"):
        resolve(mmproj="none")
    assert place.hub.bytes_sent == HEADERS // 2


def test_files_that_are_no_models_are_refused_by_their_beginnings(place, monkeypatch):
    place.hub.add(REPO, MODEL, b"<html>" + bytes(1_000_000))
    with pytest.raises(ModelError, match=f"{REPO}/{MODEL} is no GGUF file"):
        resolve()
    # a header that says of itself that it goes on and on
    counts = (1).to_bytes(8, "little") + (10**6).to_bytes(8, "little")
    place.hub.add(REPO, MODEL, b"GGUF\3\0\0\0" + counts + bytes(1 << 20))
    monkeypatch.setattr(prechecks, "MOST_HEADER", 300_000)
    with pytest.raises(ModelError, match="has a header of more than"):
        resolve()
    assert place.hub.bytes_sent <= 2 * 300_000 and not place.folder.exists()


def test_a_disk_without_room_is_found_before_anything_is_fetched(place, monkeypatch):
    usage = shutil.disk_usage(place.home.parent)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(HubError, match=r"needs 3\.6 MiB more in .*, where 1\.0 MiB are free"):
        resolve()
    assert place.hub.bytes_sent == 0


def test_a_disk_that_is_full_in_the_middle_keeps_what_has_come(place, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(fetching.os, "fsync", full)
        with pytest.raises(HubError, match="cannot be written: No space left on device; HF_HUB_CACHE names another"):
            resolve()
    assert len(place.blobs()) == 1 and place.blobs().pop().endswith(".incomplete")
    assert resolve().mmproj.is_file()


@pytest.mark.parametrize("path", ["../../../escaped.gguf", "/escaped.gguf", "a\r\nb.gguf"])
def test_a_repository_with_hostile_paths_is_refused(place, path):
    place.hub.add(REPO, path, b"GGUF")
    with pytest.raises(HubError, match="leads elsewhere"):
        resolve()
    assert place.hub.bytes_sent == 0


def test_a_checksum_or_commit_that_is_a_path_is_refused(place, monkeypatch):
    place.hub.repos[REPO][MODEL].said = "../../../escaped"
    with pytest.raises(HubError, match="no size or checksum"):
        resolve()
    place.hub.repos[REPO][MODEL].said = None
    monkeypatch.setattr(place.hub, "commit", lambda repo: "../escaped")
    with pytest.raises(HubError, match="says no commit"):
        resolve()


def test_a_file_whose_checksum_is_not_the_listed_one_is_not_fetched(place):
    place.hub.faults.etag = "d" * 64
    with pytest.raises(HubError, match="two sizes or checksums"):
        resolve()
    assert place.hub.bytes_sent == HEADERS and place.blobs() == set()


def test_as_much_of_a_file_is_read_as_its_header_takes(tiny, monkeypatch):
    path, asked = tiny("llava").model, []
    data, whole = path.read_bytes(), read_header(path)

    def fetch(begin, end):
        asked.append((begin, end))
        return data[begin:end]

    monkeypatch.setattr(prechecks, "_FIRST", 1000)
    header, start = prechecks.read_start(path, len(data), fetch)
    assert header == whole and data.startswith(start)
    assert len(asked) > 2 and whole.data_start <= len(start) + 32 and len(start) <= 4 * whole.data_start
    assert [begin for begin, _ in asked] == [0, *(end for _, end in asked[:-1])]
    for n in range(0, whole.data_start - 32, 991):
        assert header_of(path, data[:n], len(data)) is None
        with pytest.raises(ModelError, match=r"damaged or truncated|no GGUF file"):
            header_of(path, data[:n], n)


def test_a_snapshot_that_leads_out_of_the_cache_is_refused(place, tmp_path, tiny):
    pair = resolve()
    pair.model.unlink()
    pair.model.symlink_to(tiny("llava").model)
    with pytest.raises(HubError, match="leads out of the cache"):
        resolve(offline=True)
    models, problems = pykvedge.hub.cached_models()
    assert models == [] and len(problems) == 1 and "leads out of the cache" in problems[0]
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(place.folder)
    (place.folder / "snapshots" / place.hub.commit(REPO)).parent.mkdir(parents=True)
    (place.folder / "snapshots" / place.hub.commit(REPO)).symlink_to(outside)
    (place.folder / "blobs").symlink_to(outside)
    with pytest.raises(HubError, match="leads out of the cache"):
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
    assert four.files == [MODEL] and four.bytes == 0  # whose content F16 has as well
    four.run()
    assert resolve(f"{REPO}:F16", offline=True).mmproj.is_file()
    with pytest.raises(UnknownNameError):
        resolve(f"{REPO}:Q8_0", offline=True)
    last = pykvedge.hub.remove(f"{REPO}:F16")
    assert set(last.files) == {"llava-F16.gguf", MMPROJ}
    last.run()
    assert place.blobs() == set() and pykvedge.hub.cached_models() == ([], [])
    assert list((place.folder / "snapshots").iterdir()) == []  # nor folders that held the names


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
