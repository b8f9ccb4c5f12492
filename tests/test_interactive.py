"""The conversation at a terminal, by sitting at one: a pseudo-terminal types and reads."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time

import pytest

pty = pytest.importorskip("pty")
if os.name != "posix":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\r")


class Terminal:
    """A program with a person in front of it."""

    def __init__(self, arguments, environment):
        self.seen = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "pykvedge", *map(str, arguments)], environment)

    def read(self, seconds):
        """What appears within that time, without escape sequences."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return ""
        try:
            data = os.read(self.fd, 65536).decode("utf-8", "replace")
        except OSError:  # the other end is closed
            data = ""
        self.seen += ESCAPES.sub("", data)
        return data

    def wait_for(self, text, seconds=60):
        """Reads until the text has appeared; what was there up to it is forgotten and returned."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not appear in {self.seen!r}"
            self.read(0.2)
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text):
        os.write(self.fd, text.encode())

    def interrupt(self, text):
        """Presses Ctrl-C until the text appears: Python misses one that comes right before it waits for a line."""
        for _ in range(20):
            self.type("\x03")
            self.read_until(text, 3)
            if text in self.seen:
                break
        self.wait_for(text)

    def read_until(self, text, seconds):
        end = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end:
            self.read(0.2)

    def answer(self):
        """The text up to the line of figures and the next prompt."""
        text = self.wait_for("tok/s")
        self.wait_for("> ")
        return text

    def exit_code(self, seconds=60, pressing=""):
        """pressing: a key that is pressed again and again meanwhile."""
        end = time.monotonic() + seconds
        pressed = 0.0
        while time.monotonic() < end:
            if pressing and time.monotonic() - pressed > 3:  # not while it is leaving because of the last one
                with contextlib.suppress(OSError):  # it has left
                    self.type(pressing)
                pressed = time.monotonic()
            self.read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"it does not end: {self.seen!r}")

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(environment):
    """terminal(*arguments) -> a Terminal that has shown its first prompt."""
    opened = []

    def start(*arguments):
        env = {**environment, "TERM": "xterm"}
        opened.append(Terminal(["chat", *arguments], env))
        opened[-1].wait_for("> ")
        return opened[-1]

    yield start
    for t in opened:
        t.close()


@pytest.fixture
def llava(tiny):
    return [*tiny("llava").arguments(), "--max-tokens", "8"]


def test_a_conversation_with_an_image(terminal, llava, picture_file):
    t = terminal(*llava)
    t.type(f"/image {picture_file()}\n")
    assert "80 x 60" in t.wait_for("goes with the next message") + "80 x 60"
    t.wait_for("> ")
    t.type("What is this?\n")
    assert "(16 image)" in t.answer()
    t.type("And what else?\n")
    second = t.answer()
    assert "image" not in second and "of the last answer" in second
    t.type("/exit\n")
    assert t.exit_code() == 0


def test_commands(terminal, llava, picture_file):
    t = terminal(*llava)
    for typed, shown in [
        ("/help", "/image PATH"),
        ("/stats", "nothing was asked yet"),
        ("/method lokm", "did you mean 'lookm'"),
        ("/method", "/method needs a name"),
        ("/method lookm 2.5", "budget as a ratio"),
        ("/method h2o 0.5", "method h2o, budget 0.5"),
        ("/image", "/image needs a path"),
        ("/image nowhere.png", "nowhere.png does not exist"),
        (f"/image '{picture_file()}'", "goes with the next message"),
        ("/clear", "a new conversation"),
        ("/staats", "did you mean '/stats'"),
    ]:
        t.type(typed + "\n")
        t.wait_for(shown)
        t.wait_for("> ")
    t.type("Hello\n")
    assert "image" not in t.answer()  # cleared before it was sent
    t.type("/stats\n")
    t.wait_for("tokens: prompt")
    t.wait_for("rss: ")
    t.wait_for("> ")
    t.type("\x04")
    assert t.exit_code() == 0


def test_errors_do_not_end_the_conversation(terminal, llava):
    t = terminal(*llava, "--ctx", "256")
    t.type("word " * 150 + "\n")
    t.wait_for("kvedge: error: the prompt has")
    t.wait_for("> ")
    t.type("Hello\n")
    assert t.answer()
    t.type("/exit\n")
    assert t.exit_code() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal, llava):
    t = terminal(*llava[:-1], "20000", "--ctx", "30000")
    t.type("Hello\n")
    t.wait_for("Hello")
    time.sleep(1.0)
    t.type("\x03")
    assert t.answer()
    t.type("/stats\n")
    t.wait_for("tokens: prompt")
    t.wait_for("> ")
    t.type("/exit\n")
    assert t.exit_code() == 0


def test_ctrl_c_twice_at_an_empty_prompt_leaves(terminal, llava):
    t = terminal(*llava)
    t.interrupt("Ctrl-C again")
    t.wait_for("> ")
    t.type("Hello\n")
    assert t.answer()  # once is forgiven
    t.interrupt("Ctrl-C again")
    t.wait_for("> ")
    assert t.exit_code(pressing="\x03") == 0


def test_json_needs_a_prompt(environment, llava):
    t = Terminal(["chat", *llava, "--json"], environment)
    try:
        t.wait_for("--json needs a PROMPT")
        assert t.exit_code() == 2
    finally:
        t.close()


def test_progress_is_shown_on_a_terminal_only(environment, llava, kvedge):
    t = Terminal(["chat", *llava, "Hello"], {**environment, "TERM": "xterm"})
    try:
        t.wait_for("tok/s")
        assert t.exit_code() == 0
    finally:
        t.close()
    assert "\x1b" not in kvedge("chat", *llava, "Hello").err
