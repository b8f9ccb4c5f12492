"""The file of whole rows: its savings, its traces, and disks that are full, remote or missing."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import keeping
import pytest
from choosing import whole
from contexts import TinyContext
from conversations import WORDS
from keeping import Talk, answers, messages

import pykvedge
from pykvedge.errors import KvedgeError

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, or is preloaded")
MIB = 1 << 20
HERE = Path(__file__).parent
KEPT = ("--method", "snapkv", "--budget", "0.3", "--max-tokens", "12")


@pytest.fixture(scope="session")
def faults(tmp_path_factory):
    """faults(words) -> the environment of a process whose files fail in these ways (file_faults.c)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests need a C compiler"
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = HERE / "file_faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return lambda words: {"LD_PRELOAD": str(library), "FAULTS": words}


@pytest.fixture
def working(started):
    """working(script, job, env) -> the JSON of a worker."""

    def run(script, job, env=None):
        done = started(program=(HERE / script,), stdin=json.dumps(job), env=env, timeout=900)
        assert done.code == 0, (done.code, done.err[-2000:])
        return done.json

    return run


@pytest.mark.parametrize("kind", ["llama", *whole("gemma3", "qwen3", "qwen2vl")])
def test_rows_in_the_file_are_those_in_memory(native, closing, tiny, tmp_path, kind):
    """All rows are in the file before the next message is read."""
    plan = pykvedge.plan("snapkv", 0.3)
    context, other = (closing(TinyContext(tiny(kind).model, plan)) for _ in range(2))
    talk = Talk(context)
    context.cache.keep("disk", str(tmp_path))
    for message, answer in zip(messages(), answers(), strict=True):
        talk.say(message)
        assert keeping.equal_pairs(context, talk.anew(other))
        talk.answer(answer)
        deadline, before = time.monotonic() + 60, -1
        while context.cache.stats().whole_file_bytes != before or before == 0:
            assert time.monotonic() < deadline
            before = context.cache.stats().whole_file_bytes
            time.sleep(0.05)
            talk.answer([5])
        stats = context.cache.stats()
        assert stats.whole_file_bytes <= stats.whole_bytes < 1.2 * stats.whole_file_bytes + 65536
        assert not list(tmp_path.iterdir())


@linux
def test_what_is_written_leaves_memory(native, tiny, working, tmp_path):
    model = tiny("llama", n_layers=4, n_heads=4, n_heads_kv=4, head_size=128, weight="q8_0").model
    job = {"job": "memory", "model": str(model), "folder": str(tmp_path), "tokens": 1800}
    none, ram, disk = working("keep_worker.py", job).values()
    rows = 1800 * 4 * 4 * 256 * 2
    assert ram["whole"] > rows and ram["file"] == 0 and ram["private"] - none["private"] > 0.9 * rows
    assert disk["file"] >= rows and disk["private"] - none["private"] < 0.05 * rows + MIB
    assert ram["private"] - disk["private"] > 0.9 * rows


@linux
@pytest.mark.parametrize(("words", "kv_type"), [
    ("", "f16"), ("slow named", "f16"), ("slow", "q8_0"), *whole(("slow", "f16"), ("named", "f16"), ("", "q8_0"))
])  # fmt: skip
def test_random_walks_over_files(native, tiny, working, tmp_path, faults, words, kv_type):
    """Includes files during a write, and a file system without nameless files."""
    places = [("disk", str(tmp_path)), ("ram", "")]
    job = {"model": str(tiny("llama").model), "places": places, "seed": 3, "steps": 40, "type": kv_type}
    found = working("keep_walk.py", job, faults(words))
    assert found["compared"] > 10 and not found["given_up"]
    assert not list(tmp_path.iterdir())


@linux
@pytest.mark.parametrize(("words", "said"), [
    ("slow full:500000", "No space left on device"), ("threads", "no thread could be started"),
    *whole(("full:500000", "No space left on device")),
])  # fmt: skip
def test_random_walks_where_rows_cannot_be_written(native, tiny, working, tmp_path, faults, words, said):
    """Given-up rows are reported, and all other results are right."""
    job = {"model": str(tiny("llama").model), "places": [("disk", str(tmp_path))], "seed": 4, "steps": 60}
    found = working("keep_walk.py", job, faults(words))
    assert found["given_up"] and all(said in problem for problem in found["given_up"]), found
    assert not list(tmp_path.iterdir())


@linux
def test_a_full_disk_is_one_line_and_the_answer_is_the_same(native, tiny, started, kvedge, tmp_path, faults):
    arguments = ["chat", *tiny("llama").arguments(), *KEPT, "--json"]
    keeping_it = ["--keep", "disk", "--keep-folder", tmp_path]
    full = started(*arguments, *keeping_it, WORDS, env=faults("full:2"))  # the trial write into the folder succeeds
    plain, kept = kvedge(*arguments, WORDS), kvedge(*arguments, *keeping_it, WORDS)
    assert full.code == kept.code == plain.code == 0, full
    assert full.json["text"] == kept.json["text"] == plain.json["text"]
    assert not list(tmp_path.iterdir())


def test_a_session_says_that_the_disk_is_full(native, tiny, started, tmp_path, faults):
    code = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from conversations import WORDS, say
import pykvedge
said = []
for keep in ("", "disk"):
    settings = {{"keep": keep, "keep_folder": {str(tmp_path)!r}}} if keep else {{}}
    plan = pykvedge.plan("snapkv", 0.3)
    with pykvedge.Session({str(tiny("llama").model)!r}, None, plan, threads=1, **settings) as session:
        reports = [say(session, text) for text in (WORDS, "And what then?", WORDS)]
        said.append([(r.text, r.notes) for r in reports])
import json
print(json.dumps(said))
"""
    done = started("-c", code, program=(), env=faults("full:2"))
    assert done.code == 0, done.err[-2000:]
    without, full = done.json
    assert full[0][0] == without[0][0]  # later questions use the kept pairs
    notes = [note for _, notes in full for note in notes]
    assert notes and all("No space left on device" in note for note in notes)
    assert all(len(notes) <= 1 for _, notes in full)
    assert not list(tmp_path.iterdir())


@linux
@pytest.mark.parametrize(("words", "kills"), [("", 6), ("named", 6), *whole(("", 1000), ("named", 1000))])
def test_kills_leave_no_file(native, tiny, working, tmp_path, faults, words, kills):
    job = {"job": "kills", "model": str(tiny("llama").model), "folder": str(tmp_path), "seed": 1}
    found = working("keep_worker.py", {**job, "kills": kills}, faults(words))
    assert found["left"] == 0 and found["mapped"] > 0, found
    assert words or found["seen"] == 0  # the file never has a name


# ------------------------------------------------------------------------------------------------------------


def refused(kvedge, tiny, folder, *words, code=1, env=None):
    options = ["--keep", "disk", "--keep-folder", folder]
    done = kvedge("chat", *tiny("llama").arguments(), *KEPT, *options, WORDS, env=env)
    assert done.code in (1, 2), done
    done.failed(done.code, *words)


def test_folders_of_no_use_are_refused(native, tiny, kvedge, tmp_path):
    (tmp_path / "file").write_text("")
    refused(kvedge, tiny, tmp_path / "none", "none", "No such file")
    refused(kvedge, tiny, tmp_path / "file", "file", "Not a directory")
    if sys.platform.startswith("linux"):
        refused(kvedge, tiny, "/dev/shm", "/dev/shm", "tmpfs", "use another folder, or keep the rows in memory")
        refused(kvedge, tiny, "/proc", "/proc")


@linux
def test_a_folder_on_a_network_drive_is_refused(native, tiny, started, tmp_path, faults):
    refused(started, tiny, tmp_path, str(tmp_path), "network drive", env=faults("network"))


@linux
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(native, tiny, kvedge, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    refused(kvedge, tiny, folder, "locked", "Permission denied")


def test_names_that_are_none_are_refused(native, tiny):
    for folder in ("a\0b", 5, b"a\0b"):
        with pytest.raises(KvedgeError, match="keep_folder must be the path"):
            tiny("llama").session(keep="disk", keep_folder=folder)


@linux
def test_a_folder_whose_name_is_no_text(native, tiny, tmp_path):
    """A folder name that is not UTF-8 works as any other name."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff")
    with tiny("llama").session(pykvedge.plan("snapkv", 0.3), keep="disk", keep_folder=folder) as session:
        with pytest.raises(KvedgeError, match="No such file"):
            session.ask(WORDS)
        Path(folder).mkdir()
        answer = session.ask(WORDS)
        answer.read()
        assert answer.report.kv.whole_bytes > 0
