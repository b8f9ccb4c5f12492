"""Sessions with whole rows: the report at the end of an answer, and the file of pixels."""

import os
import time
from pathlib import Path

import pytest
from drafted import SCENE
from limits import small_files

import pykvedge
from pykvedge import Sampling, Settings, UsageError, load_picture

FILES = Path("/proc/self/fd")  # links to the open files
ONLY_POSIX = pytest.mark.skipif(os.name != "posix", reason="limits the size of files as POSIX does")
WORDS = "The quick brown fox jumps over the lazy dog and looks at the picture. " * 6


def slowly(answer, seen):
    """Generates until seen() is true, which waits for the disk, or until the end."""
    for _ in answer:
        if not seen():
            time.sleep(0.05)


def test_the_report_says_where_whole_rows_lie_at_the_end(tiny, tmp_path, native):
    with tiny("llama").session(pykvedge.plan("snapkv", 0.2), keep="disk", keep_folder=tmp_path) as session:
        answer = session.ask(WORDS, [], Sampling(max_tokens=60))
        report = answer.report
        assert report.kv.whole_bytes > report.kv.kept_bytes and report.kv.whole_file_bytes == 0
        slowly(answer, lambda: session.engine.cache.stats().whole_file_bytes)
        stats = session.engine.cache.stats()
        assert 0 < report.kv.whole_file_bytes == stats.whole_file_bytes <= report.kv.whole_bytes == stats.whole_bytes
        assert "in a file that the system may drop" in report.line()
        assert report.as_json()["kv"]["whole_file_bytes"] == report.kv.whole_file_bytes


def test_rows_in_memory_are_said_to_lie_there(tiny, native):
    with tiny("llama").session(pykvedge.plan("snapkv", 0.2), keep="ram") as session:
        answer = session.ask(WORDS, [], Sampling(max_tokens=3))
        answer.read()
        assert "in memory" in answer.report.line() and "in a file" not in answer.report.line()


@ONLY_POSIX
def test_a_file_that_cannot_grow_is_said_at_the_end(tiny, tmp_path, native):
    with tiny("llama").session(pykvedge.plan("snapkv", 0.2), keep="disk", keep_folder=tmp_path) as session:
        with small_files(1000):
            answer = session.ask(WORDS, [], Sampling(max_tokens=60))
            assert not answer.report.notes
            slowly(answer, lambda: session.engine.cache.keep_problem())
        assert answer.report.finish == "length" and answer.report.kv.whole_bytes == 0
        [note] = answer.report.notes
        assert note.startswith("--keep has no effect on this conversation") and "whole rows" not in answer.report.line()


@pytest.mark.parametrize("keep, held", [("disk", False), ("ram", True)])
def test_pixels_lie_in_a_file_where_whole_rows_do(tmp_path, native, keep, held):
    """The pixels are needed when the cache is lost, and the conversation is read again."""
    folder = {"keep_folder": str(tmp_path)} if keep == "disk" else {}
    with pykvedge.Session(plan=pykvedge.plan("snapkv", 0.2), keep=keep, threads=1, **folder) as session:
        said = session.ask("What is the code?", SCENE).read()
        [picture] = session.messages[0].pictures
        assert bool(picture.rgb) == held and picture.pixels() == load_picture(SCENE).rgb
        session.forget()
        assert session.ask("What is the code?").read() == said
        assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not FILES.is_dir(), reason="the system does not list the open files of a process")
def test_the_file_of_pixels_goes_with_the_conversation(tmp_path, native):
    """Otherwise the file would stay open, and grow, during the whole session."""

    def is_open():
        return any(str(file.readlink()).startswith(str(tmp_path)) for file in FILES.iterdir() if file.is_symlink())

    settings = {"keep": "disk", "keep_folder": str(tmp_path), "threads": 1}
    with pykvedge.Session(plan=pykvedge.plan("snapkv", 0.2), **settings) as session:
        session.ask("What is the code?", SCENE).read()
        assert is_open()
        session.clear()
        assert not is_open()


@ONLY_POSIX
def test_pixels_without_room_in_the_file_stay_in_memory(tmp_path, native):
    settings = {"keep": "disk", "keep_folder": str(tmp_path), "threads": 1}
    with pykvedge.Session(plan=pykvedge.plan("snapkv", 0.2), **settings) as session:
        with small_files(1000):
            session.ask("What is the code?", SCENE).read()
        assert session.messages[0].pictures[0].rgb == load_picture(SCENE).rgb


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"keep": "ram", "question_blind": True}, "keep and question_blind exclude each other"),
        ({"keep": "ram", "positions": 1024}, "keep does not work with a number for positions"),
        ({"keep": "ram", "keep_folder": "/tmp"}, "set keep to 'disk'"),
        ({"keep_folder": "/tmp"}, "set keep to 'disk'"),
        ({"keep_space": 1 << 20}, "keep_space needs keep"),
        ({"stream": True, "question_blind": True}, "question_blind has no meaning with stream"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        Settings(**settings)
