"""Input lines of a conversation: paths in every form, messages of several lines, history, completion."""

import io
import os
import sys
from pathlib import Path

import pytest

from pykvedge import ImageError, UsageError, load_picture
from pykvedge.cli import paths
from pykvedge.cli.talk import lines
from pykvedge.models import images

POSIX = os.sep == "/"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with difficult names."""
    for name in ("my cat.png", "it's.png", 'say "hi".png', "plain.png", "back\\slash.png", ".hidden.png"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "my photos").mkdir()
    (tmp_path / "my photos" / "a b.png").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("my cat.png", "my cat.png"),
        ("  'my cat.png'  ", "my cat.png"),
        ('"my cat.png"', "my cat.png"),
        (r"my\ cat.png", "my cat.png"),
        ('"it\'s.png"', "it's.png"),
        (r"it\'s.png", "it's.png"),
        (r'"say \"hi\".png"', 'say "hi".png'),
        (r"back\\slash.png", "back\\slash.png"),
        (r"my\ photos/a\ b.png", "my photos/a b.png"),
        ("'my photos/a b.png'", "my photos/a b.png"),
    ],
)
def test_a_path_is_understood_however_it_is_written(folder, text, name):
    assert paths.typed(text) == Path(name) and (folder / paths.typed(text)).is_file()


def test_a_file_that_was_dragged_here(folder):
    for name in ("my cat.png", "it's.png", "my photos/a b.png"):
        assert paths.typed((folder / name).as_uri()) == folder / name
        assert paths.typed("file://localhost" + (folder / name).as_uri().removeprefix("file://")) == folder / name
    for url in ("file://elsewhere/a.png", "file://", "FILE:"):
        with pytest.raises(UsageError, match="is not a file on this machine"):
            paths.typed(url)


def test_home_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.typed("~/a b.png") == tmp_path / "a b.png" == paths.typed(r"~/a\ b.png")
    with pytest.raises(UsageError, match="home folder"):
        paths.typed("~nobody-of-that-name/x.png")
    for empty in ("", "  ", "''"):
        with pytest.raises(UsageError, match="empty"):
            paths.typed(empty)
    for address in ("https://example.org/a.png", "'HTTP://example.org/a.png'"):
        with pytest.raises(UsageError, match=r"(?i)http.?://example.org/a.png is an address on the web"):
            paths.typed(address)


def test_paths_that_the_system_refuses_are_one_line(folder, monkeypatch):
    with pytest.raises(ImageError, match="cannot be read"):
        load_picture("x" * 800)
    with pytest.raises(UsageError, match="cannot be accessed"):
        paths.ask(Path.exists, Path("x" * 800))

    def locked(path):
        raise PermissionError(13, "Permission denied")

    # root is not locked out of any folder, so the lock is simulated
    monkeypatch.setattr(images, "require_file", locked)
    monkeypatch.setattr(Path, "is_dir", locked)
    with pytest.raises(ImageError, match="Permission denied"):
        load_picture("locked/a.png")
    with pytest.raises(UsageError, match="Permission denied"):
        paths.ask(Path.is_dir, Path("locked"))


@pytest.mark.parametrize(
    "begun", ["my", r"my\ ", "'my", '"my', "it", '"it', "say", "'say", "back", "pl", "my\\ photos/", ""]
)
def test_what_is_completed_means_the_same_file(folder, begun):
    found = paths.completions(begun)
    start = paths.unquoted(begun)
    expected = {str(p.relative_to(folder)) for p in folder.rglob("*") if str(p.relative_to(folder)).startswith(start)}
    depth = start.count("/")
    expected = {e for e in expected if e.count("/") == depth and not Path(e).name.startswith(".")}
    assert {str(paths.typed(text)) for text in found} == expected and expected
    quote = begun[:1] if begun[:1] in ("'", '"') else ""
    assert all(text.startswith(quote) for text in found)
    assert [text for text in found if text.endswith("/")] == [t for t in found if paths.typed(t).is_dir()]


def test_nothing_is_completed_where_nothing_is(folder):
    for begun in ("zzz", "no/such/folder/", "~nobody-of-that-name/", "x" * 800 + "/", "\0/"):
        assert paths.completions(begun) == []
    assert paths.completions(".h") == [".hidden.png"]


# ---------------------------------------------------------------------------------------------------


def typed_lines(monkeypatch, *typed):
    """Returns a reader without a terminal that gets these lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in typed)))
    return lines.Lines(lambda text: [], None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["  hello  "], "hello"),
        (["one\\", "two\\", "three", "four"], "one\ntwo\nthree"),
        (['"""', "one", "  two", '"""', "four"], "one\n  two"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
        (['"""', "a \\", 'b"""'], "a \\\nb"),
        (["/image C:\\photos\\", "x"], "/image C:\\photos\\"),
    ],
)
def test_messages_of_several_lines(monkeypatch, lines, message):
    assert typed_lines(monkeypatch, *lines).message("> ") == message


def test_a_block_that_never_ends(monkeypatch):
    with pytest.raises(EOFError):
        typed_lines(monkeypatch, '"""', "one").message("> ")


def test_where_the_history_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert lines.history_file() == tmp_path / "kvedge" / "chat-history"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert lines.history_file() == tmp_path / "home" / ".local" / "state" / "kvedge" / "chat-history"
