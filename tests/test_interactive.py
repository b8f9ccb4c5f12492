"""Conversations at a terminal: a pseudo-terminal types and reads."""

import contextlib
import os
import re
import select
import signal
import stat
import time

import pytest
from forking import at_terminal

if os.name != "posix":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

PROMPT = "\x1b[?2004h"  # switches bracketed paste on: the program waits for a message
ESCAPES = re.compile(r"\x1b\[(?!\?2004h)[0-9;?]*([a-zA-Z])|\x1b\][^\x07]*\x07|[\r\x08]")

XTERM = {"TERM": "xterm", "COLUMNS": "200", "PROMPT_TOOLKIT_NO_CPR": "1"}  # the terminal is not asked for its cursor


class Terminal:
    """A program at a pseudo-terminal, with methods for typing and reading."""

    def __init__(self, arguments, environment):
        self.seen = self.raw = self._part = ""
        self.pid, self.fd = at_terminal(arguments, environment, 40, 200)  # lines long enough for the figures

    def read(self, seconds):
        """Returns the text that appears within that time, without escape sequences."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return ""
        try:
            data = os.read(self.fd, 65536).decode("utf-8", "replace")
        except OSError:  # the other end is closed
            data = ""
        self.raw += data
        whole, self._part = re.match(r"(.*?)(\x1b[^a-zA-Z]*)?\Z", self._part + data, re.S).groups("")
        self.seen += ESCAPES.sub(lambda found: " " if found[1] == "C" else "", whole)  # the cursor moves on
        return data

    def wait_for(self, text, seconds=60):
        """Reads until the text has appeared. Removes and returns the text before it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not appear in {self.seen!r}"
            self.read(0.2)
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text):
        os.write(self.fd, text.encode())

    def interrupt(self, text):
        """Presses Ctrl-C until the text appears: Python misses one just before it waits for a line."""
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

    def shows(self, text, seconds=60):
        """Reads until the text and then the next prompt have appeared. Returns what was before the text."""
        before = self.wait_for(text, seconds)
        self.wait_for(PROMPT)
        return before

    def enter(self, line, shown):
        """Types a line. Reads until `shown` and the next prompt."""
        self.type(line + "\n")
        return self.shows(shown)

    def answer(self):
        """Returns the text up to the line of figures. Reads until the next prompt."""
        return self.shows("tok/s")

    def leave(self):
        """Ends the program if it still runs."""
        if self.pid:
            self.type("/exit\n")
            assert self.exit_code() == 0

    def exit_code(self, seconds=60, pressing=""):
        """Returns the exit code. pressing: a key to press repeatedly until the end."""
        end = time.monotonic() + seconds
        pressed = 0.0
        while time.monotonic() < end:
            if pressing and time.monotonic() - pressed > 3:  # not while it ends because of the last press
                with contextlib.suppress(OSError):  # the program has ended
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
def state(tmp_path):
    """The folder of the user's state."""
    return tmp_path / "state"


@pytest.fixture
def terminal(environment, state):
    """terminal(*arguments) -> a Terminal that has shown its first prompt."""
    opened = []

    def start(*arguments):
        env = {**environment, **XTERM, "XDG_STATE_HOME": str(state)}
        opened.append(Terminal(["chat", *arguments], env))
        opened[-1].wait_for(PROMPT)
        return opened[-1]

    try:
        yield start
        for t in opened:
            t.leave()
    finally:
        for t in opened:
            t.close()


@pytest.fixture
def llava(tiny):
    return [*tiny("llava").arguments(), "--max-tokens", "8"]


def test_a_conversation_with_an_image(terminal, llava, picture_file):
    t = terminal(*llava)
    t.type(f"/image {picture_file()}\n")
    assert "80 x 60" in t.shows("sent with the next message") + "80 x 60"
    t.type("What is this?\n")
    assert "(16 image)" in t.answer()
    t.type("And what else?\n")
    second = t.answer()
    assert "image" not in second and "from the last answer" in second
    assert "\x1b[2mprompt " in t.raw  # dimmed
    t.raw = ""
    t.type("exit\n")
    assert t.exit_code() == 0 and "tok/s" not in t.raw


def test_commands(terminal, llava, picture_file):
    t = terminal(*llava)
    for typed, shown in [
        ("/help", "/image PATH"),
        ("/stats", "no question was asked yet"),
        ("/method lokm", "did you mean 'lookm'"),
        ("/method", "/method needs a name"),
        ("/method lookm 2.5", "budget as a ratio"),
        ("/method h2o 0.5", "method h2o, budget 0.5"),
        ("/image", "/image needs a path"),
        ("/image nowhere.png", "nowhere.png does not exist"),
        (f"/image '{picture_file()}'", "sent with the next message"),
        ("/clear", "started a new conversation"),
        ("/staats", "did you mean '/stats'"),
        ("/image " + "x" * 800, "cannot be read: File name too long"),
        ("/image ~nobody-of-that-name/x.png", "home folder"),
        ("/image file://elsewhere/x.png", "is not a file on this machine"),
        ("/image \u00ff\u2028", "does not exist"),
        ("/save ~nobody-of-that-name/x", "home folder"),
        ("/save " + "x" * 800, "the session has no conversation to save"),
        ("/undo", "there is no message to undo"),
        ("/retry", "there is no message to undo"),
        ("/undo 3", "/undo takes no value"),
        ("/drop", "/drop needs the number of a message"),
        ("/drop 2", "turn 2 cannot be dropped: the conversation has 0 turns"),
        ("/exit now", "/exit takes no value"),
        ("/budget", "/budget needs a share of the prompt"),
        ("/budget 0", "at least 1 KV pair"),
        ("/budget 0.25", "method h2o, budget 0.25"),
        ("/set temp", "/set needs a name and a value"),
        ("/set temp hot", "temp must be a number"),
        ("/set top_k 1.5", "top_k must be a whole number"),
        ("/set temp 300", "between 0 and 100"),
        ("/set temprature 1", "did you mean 'temp'"),
        ("/set temp 0.5", "temp 0.5, from the next message on"),
        ("/set temp=0", "temp 0.0, from the next message on"),
        ("/set seed random", "seed random"),
        ("/set scorer.widow 4", "unknown setting 'scorer.widow'"),
        ("/method kvedge 0.5", "method kvedge, budget 0.5"),
        ("/budget 0.1", "method kvedge, budget 0.1"),
        ("/set", "  scorer.text 16"),
        ("/method snapkv", "method snapkv, budget 0.2"),
        ("/set scorer.window 16", "scorer.window 16, from the next message on"),
        ("/set", "  scorer.window 16"),
        ("/method full", "method full"),
        ("/budget 0.5", "keeps all KV pairs"),
        ("<image> what?", "the prompt has 1 place for images (<image>), and no images were given"),
    ]:
        t.enter(typed, shown)
    assert "image" not in question(t, "Hello")  # cleared before it was sent
    t.type("/stats\n")
    t.wait_for("tokens: prompt")
    t.shows("rss: ")
    t.type("\x04")
    assert t.exit_code() == 0


def question(t, text):
    return t.enter(text, "tok/s")


def test_a_message_is_put_again_and_taken_back(terminal, llava, picture_file):
    t = terminal(*llava, "--method", "lookm")
    question(t, "What is this? Tell me all about it.")
    t.enter(f"/image {picture_file()}", "image 1: ")
    second = question(t, "And that?")
    assert "(16 image)" in second
    again = question(t, "/retry").replace("image, 1 from the cache)", "image)")  # it was encoded the first time
    figures = re.compile(r"prompt \d+ tokens.*? \| KV [^|]*")
    assert figures.search(again)[0] == figures.search(second)[0]
    t.enter("/stats", "undo: ")
    t.enter("/undo", "removed the last message and its answer: And that? and its 1 image")
    t.enter("/undo", "only the last message")
    assert "image" not in question(t, "And that?")
    t.type("/clear\n")
    t.wait_for(PROMPT)
    assert "from the last answer" in second and "from the last answer" not in question(t, "Hello")


def test_a_message_leaves_the_conversation(terminal, llava, picture_file):
    t = terminal(*llava, "--method", "snapkv", "--keep", "ram")
    question(t, f"{picture_file()} What is this?")
    question(t, "And what is that?")
    question(t, "Hello")
    t.enter("/drop 2", "removed message 2 and its answer: And what is that?")
    t.enter("/drop 2", "the conversation has 2 turns")
    question(t, "Hello again")


def test_a_message_that_was_taken_back_is_put_again(terminal, llava, picture_file):
    t = terminal(*llava, "--ctx", "512")
    first = question(t, f"{picture_file()} What is this?")
    t.enter("/undo", "removed the last message and its answer: What is this? and its 1 image")
    again = question(t, "/retry")
    assert "(16 image, 1 from the cache)" in again and "(16 image)" in first
    t.enter("/undo\n/undo", "there is no message to undo")
    t.enter("word " * 200, "kvedge: error: ")  # too long
    t.enter("/set seed 1\n/retry", "kvedge: error: ")


def test_without_copies_there_is_no_way_back(terminal, llava):
    t = terminal(*llava, "--no-undo")
    question(t, "Hello")
    question(t, "And?")
    t.enter("/undo", "cannot be undone")


def test_a_stream_says_why_nothing_is_taken_back(terminal, llava):
    t = terminal(*llava, "--stream", "--method", "snapkv", "--budget", "64")
    question(t, "Hello")
    t.enter("/retry", "a message of a stream cannot be undone")


def test_a_message_of_several_lines_is_one(terminal, llava, kvedge):
    expected = kvedge("chat", *llava, "--json", "one\ntwo\nthree").json["tokens"]["prompt"]
    t = terminal(*llava)
    for typed in ("one\\\ntwo\\\nthree\n", '"""\none\ntwo\nthree\n"""\n'):
        t.type(typed)
        assert re.findall(r"prompt (\d+) tokens", t.answer()) == [str(expected)]
        t.type("/clear\n")
        t.wait_for(PROMPT)


def test_a_paste_of_two_lines_is_one_message_with_plain_figures(terminal, llava, kvedge, environment, monkeypatch):
    expected = kvedge("chat", *llava, "--json", "one\ntwo").json["tokens"]["prompt"]
    monkeypatch.setitem(environment, "NO_COLOR", "1")
    t = terminal(*llava)
    t.type("\x1b[200~one\r\ntwo\x1b[201~")
    t.read_until("two", 10)
    assert "tok/s" not in t.seen  # waits for Enter
    assert re.findall(r"prompt (\d+) tokens", question(t, "")) == [str(expected)]
    assert "\x1b[2m" not in t.raw


def test_pictures_are_dragged_into_a_message(terminal, llava, picture_file, tmp_path):
    """test_mentioned.py tests ten ways to write paths."""
    (tmp_path / "the cat.png").write_bytes(picture_file().read_bytes())
    t = terminal(*llava)
    said = question(t, f"{tmp_path}/the\\ cat.png what is it?")
    assert "added the cat.png as image 1\n" in said and "(16 image)" in said
    t.enter(f"file://{tmp_path}/the%20cat.png", "added the cat.png as image 2, sent with the next message")
    said = question(t, "And in nowhere.png?")
    assert (
        "the file nowhere.png does not exist, so its path stays text in the message" in said
        and "(16 image, 1 from the cache)" in said
    )
    (tmp_path / "broken.png").write_bytes(b"no picture")
    t.enter(f"what is '{tmp_path}/broken.png'?", "kvedge: error: ")
    t.type("/bye\n")
    assert t.exit_code() == 0


def test_tab_completes_commands_and_paths(terminal, llava, picture_file, tmp_path):
    folder = tmp_path / "holiday photos"
    folder.mkdir()
    (folder / "the cat.png").write_bytes(picture_file().read_bytes())
    t = terminal(*llava)
    t.type("/im\t")
    t.wait_for("/image ")
    t.type(f"{tmp_path}/hol\t")
    t.wait_for("holiday\\ photos/")
    t.type("the\t")
    t.wait_for("the\\ cat.png")
    t.enter("", "image 1: the cat.png")
    t.type(f"/image '{tmp_path}/hol\t")
    t.wait_for("holiday photos/")
    t.enter("the\t", "image 2: the cat.png")
    t.enter("/method loo\t", "method lookm, budget 0.2")
    t.type("/set scorer.\t\x15/exit\n")
    assert t.exit_code() == 0


def kept(file):
    return [line[1:] for line in file.read_text().splitlines() if line.startswith("+")]


def test_what_was_typed_is_remembered_unless_that_is_switched_off(terminal, llava, state):
    file = state / "kvedge" / "chat-history"
    t = terminal(*llava)
    t.enter("/set seed 12345", "from the next message on")
    t.leave()
    assert kept(file) == ["/set seed 12345", "/exit"] and stat.S_IMODE(file.stat().st_mode) == 0o600
    t = terminal(*llava, "--no-history")
    t.enter("/set seed 54321", "from the next message on")
    t.leave()
    t = terminal(*llava)
    t.enter("\x1b[A\x1b[A", "seed 12345, from the next message on")  # twice up
    t.leave()
    assert kept(file) == ["/set seed 12345", "/exit", "/set seed 12345", "/exit"]


def test_a_history_that_cannot_be_kept_is_one_line(terminal, llava, state):
    state.write_text("a file where a folder should be")
    t = terminal(*llava)
    assert "chat-history cannot be written" in t.raw


def test_a_conversation_that_is_taken_up_says_what_it_holds(environment, state, saved, kvedge, closing):
    model, file = saved
    arguments = [*model.arguments(), "--session", str(file), "--max-tokens", "4"]
    holds = r"s\.kvs holds 1 answer, 1 image, (\d+) tokens, (\d+) KV pairs kept per KV head, [\d.]+ KiB, "
    done = kvedge("chat", *arguments, "And?")
    found = re.match(holds + r"method lookm, budget 0\.25\n", done.err)
    assert found and 0 < int(found[2]) < int(found[1]), done.err
    assert "s.kvs" not in kvedge("chat", *arguments, "--quiet", "And?").err
    t = closing(Terminal(["chat", *arguments], {**environment, **XTERM, "XDG_STATE_HOME": str(state)}))
    t.shows("s.kvs holds 3 answers, 1 image")
    t.enter("/undo", "there is no message to undo")
    question(t, "More?")
    t.enter("/undo", "removed the last message and its answer: More?")
    t.leave()


def test_errors_do_not_end_the_conversation(terminal, llava):
    t = terminal(*llava, "--ctx", "256")
    t.enter("word " * 150, "kvedge: error: the prompt has")
    assert question(t, "Hello")


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal, llava):
    t = terminal(*llava[:-1], "20000", "--ctx", "30000")
    t.type("Hello\n")
    t.wait_for("Hello")
    time.sleep(1.0)
    t.type("\x03")
    assert t.answer()
    t.enter("/stats", "tokens: prompt")


def test_a_question_that_was_stopped_can_be_edited(terminal, llava):
    t = terminal(*llava, "--ctx", "30000")
    t.type("~" * 8000 + "\n")  # one token each
    t.wait_for("reading")
    t.interrupt("(stopped; edit the question and press Enter)")
    t.wait_for(PROMPT)
    t.wait_for("~~~")
    t.type("\x03")  # clears the line
    assert int(re.findall(r"prompt (\d+) tokens", question(t, "Hello"))[0]) < 100


def test_ctrl_c_twice_at_an_empty_prompt_leaves(terminal, llava):
    t = terminal(*llava)
    t.interrupt("Ctrl-C again")
    t.wait_for(PROMPT)
    assert question(t, "Hello")  # once is tolerated
    t.interrupt("Ctrl-C again")
    t.wait_for(PROMPT)
    assert t.exit_code(pressing="\x03") == 0


def test_json_needs_a_prompt(environment, llava, closing):
    t = closing(Terminal(["chat", *llava, "--json"], environment))
    t.wait_for("--json needs a PROMPT")
    assert t.exit_code() == 2


def test_progress_is_shown_on_a_terminal_only(environment, llava, kvedge, closing):
    t = closing(Terminal(["chat", *llava, "Hello"], {**environment, "TERM": "xterm"}))
    t.wait_for("tok/s")
    assert t.exit_code() == 0
    assert "\x1b" not in kvedge("chat", *llava, "Hello").err
