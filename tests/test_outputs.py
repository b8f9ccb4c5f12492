"""Tables and profiles that cannot be written: refused before the measurement, and no result is lost after it."""

import errno
import os

import pytest

from kvedge_lab import progress
from kvedge_lab.commands import common
from kvedge_lab.eval.tasks import demo_samples, page_samples
from kvedge_lab.progress import Steps
from pykvedge import SaveError
from pykvedge.cli.tables import markdown
from pykvedge.system import files


@pytest.mark.parametrize("arguments", [
    ("eval", "--output", "{}/t.md"), ("eval", "--output", "{}/old.csv"), ("bench", "--output", "{}/t.md"),
    ("bench", "--plot", "{}/t.svg"), ("eval", "--plot", "{}/t.svg"), ("tune", "--html", "{}/t.html"),
    ("calibrate", "heads", "--output", "{}/new/p.json"), ("calibrate", "prefix"), ("inspect", "--output", "{}/r"),
    ("eval", "--recipe", "mixkv-chartqa", "--paper", "{}/t.tex", "{}/old.csv"),
])  # fmt: skip
def test_what_may_not_be_written_is_refused_before_the_measurement(refused, tmp_path, monkeypatch, arguments):
    """os.access stands for a read-only folder, because root may write everywhere."""
    (tmp_path / "old.csv").write_text("old")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)
    refused(*(one.format(tmp_path) for one in arguments)).failed(2, "cannot be written: ", str(tmp_path))
    assert (tmp_path / "old.csv").read_text() == "old" and not list(tmp_path.glob("[nrt]*"))


def test_a_table_that_cannot_be_written_is_on_stdout(tmp_path, monkeypatch, capsys):
    path = tmp_path / "t.md"
    path.write_text("the table of yesterday")
    given = {"output": path, "as_json": False}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", full)
        with pytest.raises(SaveError, match=r"t\.md cannot be written: No space left .*; the table is on stdout"):
            common.write_table(given, {"md": lambda: "measured for hours"})
    assert capsys.readouterr().out == "measured for hours\n"
    assert path.read_text() == "the table of yesterday" and len(list(tmp_path.iterdir())) == 1
    common.write_table(given, {"md": lambda: "measured for hours"})
    assert path.read_text() == "measured for hours\n" and capsys.readouterr().out == ""


def test_names_in_tables_and_messages_are_one_line_without_commands(capsys):
    rows = [["task", "score"], ["a|b\n\x1b[2Jc", "1"], ["d", "2"]]
    assert markdown(rows).splitlines()[2:] == [r"| a\|b \x1b[2Jc | 1     |", "| d             | 2     |"]
    Steps(enabled=True).say("kvedge: a\nb\x1b[2J left out")
    assert capsys.readouterr().err == "kvedge: a b\\x1b[2J left out\n"


def test_long_work_is_told_in_a_file(capsys, monkeypatch):
    """Commands that give a Steps to a session tell shares of the work; the drawing of samples counts them."""
    monkeypatch.setattr(progress, "FILE_S", 0.0)
    display = Steps(enabled=True)
    display("measuring the heads", 0.25)
    assert capsys.readouterr().err == "measuring the heads, 25 %\n"
    for draw, name in ((demo_samples, "code"), (demo_samples, "code+colour"), (page_samples, "page-line")):
        seen = []
        assert draw(name, 3, 0, 2, look=lambda: seen.append(1)) == draw(name, 3, 0, 2)  # noqa: B023 - called at once
        assert len(seen) == 3
