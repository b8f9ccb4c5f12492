"""A conversation in a terminal of 80 columns, as a person sees it. KVEDGE_PICTURES=docs/images keeps a picture."""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

CLEAN = "env -u NO_COLOR -u TMUX PS1='$ ' bash --norc --noprofile"


class Tmux:
    """A terminal in tmux, read as it is displayed."""

    def __init__(self, folder, environment):
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", os.devnull]
        self._env = {**environment, "XDG_STATE_HOME": str(folder / "state"), "SHELL": "/bin/sh"}
        self("new-session", "-d", "-x", "80", "-y", "60", "-c", str(ROOT), CLEAN)

    def __call__(self, *arguments):
        done = subprocess.run([*self._tmux, *arguments], env=self._env, text=True, capture_output=True, check=True)
        return done.stdout

    def type(self, text, *keys):
        self("send-keys", "-l", text)
        self("send-keys", *keys, "Enter")

    def wait_for(self, pattern, seconds=15):
        """Waits until the end of the screen matches the pattern. Returns the screen."""
        end = time.monotonic() + seconds
        while not re.search(pattern + r"\s*\Z", seen := self("capture-pane", "-p")):
            assert time.monotonic() < end, seen
            time.sleep(0.1)
        return seen


@pytest.fixture
def tmux(tmp_path, environment):
    if shutil.which("tmux") is None:
        pytest.skip("tmux is missing")
    (tmp_path / "kvedge").write_text(f'#!/bin/sh\nexec {sys.executable} -m pykvedge "$@"\n')
    (tmp_path / "kvedge").chmod(0o755)
    terminal = Tmux(tmp_path, {**environment, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    yield terminal
    terminal("kill-server")


def test_a_conversation_at_80_columns(tmux, tmp_path):
    tmux.wait_for(r"\$")
    tmux.type("kvedge chat")
    tmux.wait_for("\n>")
    for typed, answer in (
        ("/budget 0.2", "method kvedge, budget 0.2, from the next message on"),
        ("What is the code? 'examples/scene-1.png'", "added scene-1.png as image 1\n64UM3"),
        ("How many circles are there?", "three"),
        ("Where is the red circle?", "at the middle centre"),
    ):
        tmux.type(typed)
        tmux.wait_for(f"\n> {re.escape(typed)}\n{re.escape(answer)}\n(prompt .*\n(  .* tok/s\n)?)?>")
    save(tmux("capture-pane", "-p", "-e"), Path(os.environ.get("KVEDGE_PICTURES", tmp_path)) / "chat.svg")
    tmux.type("/stats")
    tmux.wait_for("before the last message\n>")
    tmux.type("/set nonsense 3")
    tmux.wait_for("top_p, typical_p\n>")
    tmux.type("/help")
    tmux.wait_for("typed.\n>")
    assert tmux("capture-pane", "-p") == tmux("capture-pane", "-p", "-J").replace(" \n", "\n")  # no line is wrapped
    tmux("set-buffer", "How many\ncircles are there?")
    tmux("paste-buffer", "-p")
    tmux.wait_for("\n> How many\n. circles are there.")
    tmux("send-keys", "C-c")
    tmux.wait_for("typed.\n>")
    tmux.type("exit")
    tmux.wait_for(r"\n\$")


def save(seen, file):
    """Writes a picture of a terminal, without fonts that a page would fetch."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(seen.rstrip("> \n")))
    style = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
    file.write_text(console.export_svg(title="kvedge chat", code_format=style, unique_id="chat"), "utf-8")
