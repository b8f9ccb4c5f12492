"""Invalid paths and numbers: folders, pipes, sockets and devices are refused before they are opened."""

import os
import socket
from itertools import pairwise
from pathlib import Path

import pytest

import pykvedge
from kvedge_lab.eval.files import read_text
from pykvedge import DatasetError, ImageError, ModelError, ProfileError, SessionFileError, frames
from pykvedge.models.gguf import read_header
from pykvedge.models.images import load_picture, picture_size
from pykvedge.plans import profile
from pykvedge.system.files import write_whole

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
KINDS = ("a folder", "a pipe", "a socket", "a device")


@pytest.fixture
def no_files(tmp_path, monkeypatch):
    """Yields {kind: path}. The names are short, because a socket's path has at most about 100 characters."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        yield {kind: tmp_path / kind[2:] for kind in KINDS[:3]} | {"a device": Path("/dev/zero")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("read", "error"), [
    (load_picture, ImageError),
    (picture_size, ImageError),
    (lambda path: next(frames(path)), ImageError),
    (read_header, ModelError),
    (profile.load, ProfileError),
    (read_text, DatasetError),
])  # fmt: skip
def test_what_reads_files(no_files, kind, read, error):
    with pytest.raises(error, match=f"{no_files[kind]} cannot be read: the path is {kind}, not a file"):
        read(no_files[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_sessions(tiny, native, no_files, kind):
    with tiny("llama").session() as session:
        session.ask("Hello", sampling=pykvedge.Sampling(max_tokens=1)).close()
        for call in (session.save, session.load):
            with pytest.raises(
                SessionFileError, match=f"{no_files[kind]} cannot be used: the path is {kind}, not a file"
            ):
                call(no_files[kind])
        assert session.in_cache
        assert os.path.samestat(no_files[kind].lstat(), no_files[kind].stat())  # the special file was not replaced


def test_the_program(kvedge, tiny, no_files):
    model, pipe = tiny("llava"), no_files["a pipe"]
    for kind, path in no_files.items():
        kvedge("chat", *model.arguments(), "--image", path, "?", timeout=60).failed(
            1, f"the path is {kind}, not a file"
        )
    kvedge("chat", *model.arguments(), "--session", pipe, "?", timeout=60).failed(2, "the path is a pipe, not a file")
    kvedge("inspect", pipe, timeout=60).failed(1, "the path is a pipe, not a file")
    kvedge("eval", "--model", pipe, timeout=60).failed(2, "the path is a pipe, not a file")


PLACES = [
    ["chat", "--session", "{}", "?"], ["chat", "--plugin", "{}", "?"], ["chat", "--image", "{}", "?"],
    ["eval", "--model", "{}"], ["eval", "{}"], ["inspect", "{}"], ["fit", "{}"], ["bench", "--save", "{}"],
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_paths_that_are_none(refused, place):
    refused(*(word.format("x" * 5000) for word in place)).failed(2, "is invalid: File name too long")
    refused(*(word.format("") for word in place)).failed(2, "the path is empty")


@pytest.mark.parametrize("arguments", [
    ["eval", "--samples", "99999999999999999999"], ["eval", "--samples", "0"], ["eval", "--images", "-1"],
    ["eval", "--images", "9"], ["eval", "--seed", "-1"], ["eval", "--limit", "99999999999999999999"],
    ["bench", "--repeat", "99999999999999999999"], ["calibrate", "heads", "--samples", "99999999999999999999"],
    ["chat", "--ctx", "99999999999999999999", "?"], ["chat", "--threads", "-1", "?"],
], ids=" ".join)  # fmt: skip
def test_numbers_that_are_too_small_or_too_large(refused, arguments):
    option, value = next((o, v) for o, v in pairwise(arguments) if o.startswith("--"))
    refused(*arguments).failed(2, f"{option} must be at", f"not {value}")


def test_what_is_written_whole_leaves_links_and_pipes_what_they_are(no_files, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file.name)
    write_whole(link, "new")
    assert link.is_symlink() and file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o640
    reading = os.open(no_files["a pipe"], os.O_RDONLY | os.O_NONBLOCK)
    write_whole(no_files["a pipe"], "text")
    assert os.read(reading, 99) == b"text" and no_files["a pipe"].is_fifo()
    os.close(reading)
    with pytest.raises(IsADirectoryError):
        write_whole(no_files["a folder"], "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "pipe", "socket"]
