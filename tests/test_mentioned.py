"""Paths of pictures in a message, in every form that terminals, file managers and people write."""

import os
from pathlib import Path

import pytest
from PIL import Image

from pykvedge.cli.talk import commands
from pykvedge.cli.talk.pictures import candidates, looks_like_path, mentioned
from pykvedge.errors import ImageError

POSIX = os.sep == "/"
ONLY_POSIX = pytest.mark.skipif(not POSIX, reason="escapes blanks with backslashes")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with pictures, a text, and a text file with the name of a picture."""
    for name in ("a.png", "my cat.JPG", "it's.png", "sub/b.webp", "sub/no-suffix"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 3)).save(tmp_path / name, format="PNG")
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "broken.png").write_text("text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "text", "names"),
    [
        ("a.png What is it?", "What is it?", ["a.png"]),
        ("What is it? a.png", "What is it?", ["a.png"]),
        ("What is it?\nHERE/a.png", "What is it?", ["a.png"]),
        ("What is in a.png?", "What is in image 3?", ["a.png"]),
        ("Describe (a.png), please.", "Describe (image 3), please.", ["a.png"]),
        ("Is a.png like sub/b.webp?", "Is image 3 like image 4?", ["a.png", "b.webp"]),
        ("a.png sub/b.webp\nWhat differs?", "What differs?", ["a.png", "b.webp"]),
        ("What differs? 'HERE/a.png' 'HERE/my cat.JPG' ", "What differs?", ["a.png", "my cat.JPG"]),
        ("HERE/a.png", "", ["a.png"]),
        ("my cat.JPG", "", ["my cat.JPG"]),
        ("HERE/my cat.JPG what is it?", "what is it?", ["my cat.JPG"]),
        ('"HERE/my cat.JPG" what is it?', "what is it?", ["my cat.JPG"]),
        ("What is file://HERE/my%20cat.JPG?", "What is image 3?", ["my cat.JPG"]),
        ("./sub/no-suffix what?", "what?", ["no-suffix"]),
        ("In <image> a.png is what?", "In <image> is what?", ["a.png"]),
        ("What's in the dog's photo? a.png it isn't", "What's in the dog's photo? image 3 it isn't", ["a.png"]),
        ("a, b and/or c in 24/7: what is /usr?", None, []),
        ("code \\<image> 'quoted' \\n", None, []),
    ],
)
def test_where_a_picture_is_named(folder, typed, text, names):
    typed = typed.replace("HERE", str(folder))
    found = mentioned(typed, 3)
    assert found.text == (typed if text is None else text)
    assert [picture.name for picture in found.pictures] == names and found.hints == []


@ONLY_POSIX
@pytest.mark.parametrize("path", [r"HERE/my\ cat.JPG", r"'HERE/it'\''s.png'", r"HERE/it\'s.png", "~/a.png"])
def test_paths_as_a_shell_has_them(folder, path):
    found = mentioned(f"{path.replace('HERE', str(folder))} what is it?", 1)
    assert found.text == "what is it?" and len(found.pictures) == 1


def test_pages_of_a_document(folder):
    page = Image.new("RGB", (30, 20), "red")
    page.save(folder / "a b.pdf", save_all=True, append_images=[page, page])
    for typed, text, n in (
        (f"{folder}/a\\ b.pdf[2-3] differ?", "differ?", 2),
        (f"'{folder}/a b.pdf' What?", "What?", 3),
        (f"Is '{folder}/a b.pdf[1]'?", "Is image 1?", 1),
    ):
        found = mentioned(typed, 1)
        assert (found.text, len(found.pictures), found.hints) == (text, n, [])


def test_what_is_no_picture_stays_text(folder):
    for typed, hint in (
        ("What is in nowhere.png?", "the file nowhere.png does not exist, so its path stays text in the message"),
        (
            f"{folder}/nowhere.png is what?",
            f"the file {folder}/nowhere.png does not exist, so its path stays text in the message",
        ),
        (
            "https://example.org/x.png",
            "the file https://example.org/x.png does not exist, so its path stays text in the message",
        ),
        (
            f"sum {folder}/notes.txt up",
            f"{folder / 'notes.txt'} is not a picture, so its path stays text in the message",
        ),
    ):
        found = mentioned(typed, 1)
        assert (found.text, found.pictures, found.hints) == (typed, [], [hint])
    with pytest.raises(ImageError, match=r"broken\.png"):
        mentioned("what is broken.png", 1)


def test_long_pastes_are_read(folder):
    for text in ("word and/or it's 3.5 " * 3000, "/ " * 3000 + "x", "!" * 30000, "'" * 9999):
        assert mentioned(text, 1).text == text.strip()
    found = mentioned("and/or it's " * 500 + "a.png", 1)
    assert found.text.endswith("it's image 1")


def test_paths_of_windows():
    for typed in (r'"C:\my pics\a.png" what?', r"C:\my pics\a.png what?", r"C:\b\a.png, what?", r"D:/b/a.png?"):
        paths = [str(path) for _, path in candidates(typed, 0, windows=True)]
        assert any(typed.strip('"').startswith(path) and path.endswith("a.png") for path in paths), paths
    assert r"\\host\share\a.png" in [str(path) for _, path in candidates(r"\\host\share\a.png", 0, windows=True)]


def test_a_path_is_no_command(folder):
    for line in ("/tmp/x.png", "/x.png what?", "/home/me/notes", f"{folder}/my cat.JPG"):
        assert looks_like_path(line.split()[0]) and not commands.is_command(line)
    for line in ("/help", "/?", "/image a.png", "/imgae a/b.png", "/save a/b.kvs"):
        assert commands.is_command(line)


def test_a_path_is_completed_in_a_message(folder):
    for begun, whole in (
        ("what is in sub/b", ["what is in sub/b.webp"]),
        (f"{folder}/a.", [f"{folder}/a.png"]),
        ("/he", ["/help"]),
        ("what?", []),
        ("see 'my", ["see 'my cat.JPG'"]),
    ):
        assert commands.completions(None, begun) == whole
    assert Path("a.png").exists()
