"""A program that starts without stdin, stdout or stderr, and Ctrl-C while C code calls Python."""

import os
import subprocess
import sys

import pytest
from choosing import whole

import pykvedge
from pykvedge.native import llamacpp

POSIX = pytest.mark.skipif(os.name != "posix", reason="a shell closes the streams")


@pytest.fixture
def closed(environment, tiny):
    """closed(redirections) runs `kvedge chat`, with a shell's redirections."""

    def run(redirections, *more, shell="sh"):
        words = [sys.executable, "-m", "pykvedge", "chat", *tiny("llama").arguments(), "--max-tokens", "3", *more]
        return subprocess.run(
            [f"/bin/{shell}", "-c", f'exec "$@" {redirections}', "sh", *map(str, words)],
            capture_output=True, text=True, env=environment, timeout=300, check=False,
        )  # fmt: skip

    return run


@POSIX
def test_without_stderr_the_answer_is_written_and_errors_go_nowhere(closed, kvedge, tiny):
    answer = kvedge("chat", *tiny("llama").arguments(), "--max-tokens", 3, "Hello").out
    done = closed("2>&-", "Hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, answer, "") and answer.strip()
    for redirections in ("2>&-", "0<&- 2>&-"):
        done = closed(redirections, "--method", "nonsense", "Hello")
        assert (done.returncode, done.stdout) == (2, "")
    done = closed("2>&-", "--verbose", "Hello")
    assert (done.returncode, done.stdout) == (0, answer)


@POSIX
def test_without_stdout_there_is_one_line(closed):
    for redirections in (">&-", "0<&- >&-"):
        done = closed(redirections, "Hello")
        assert done.returncode == 1 and done.stderr == (
            "kvedge: error: stdout is closed, so kvedge cannot print its output; open stdout\n"
        )
    assert closed(">&- 2>&-", "Hello").returncode == 1


@POSIX
@pytest.mark.parametrize("more", [(), *whole((("--json",),))])
def test_where_nobody_reads_the_exit_code_says_so(closed, more):
    """click's exit code would be 1, which means a failure."""
    done = closed("> >(exit)", "Hello", *more, shell="bash")
    assert (done.returncode, "error" in done.stderr) == (141, False)


@POSIX
@pytest.mark.parametrize("command", ["--help", "--version", *whole("doctor")])
def test_where_nobody_reads_any_command_says_so(environment, command):
    words = ["/bin/bash", "-c", 'exec "$@" > >(exit)', "bash", sys.executable, "-m", "pykvedge", command]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (141, "")


@POSIX
def test_without_stdin_there_is_no_prompt(closed):
    assert "the prompt is empty" in closed("0<&-").stderr
    assert closed("0<&-", "Hello").returncode == 0


# ------------------------------------------------------------------------------------------------- Ctrl-C


PRESSED_IN = """
import os, signal, sys
from {module} import {owner}
before = {owner}.{method}
def pressed(*arguments, **named):
    out = before(*arguments, **named)
    os.kill(os.getpid(), signal.SIGINT)
    return out
{owner}.{method} = pressed
from pykvedge.cli import program
program.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(("module", "owner", "method"), [
    ("pykvedge.models.encoder", "Encoder", "__init__"),  # after the last check of the event
    *whole(("pykvedge.chat.session", "Session", "load")),
])  # fmt: skip
def test_ctrl_c_while_things_are_loaded_ends_the_program(kvedge, tiny, tmp_path, module, owner, method):
    arguments = ["chat", *tiny("llava").arguments(), "--session", tmp_path / "a.kvs", "--max-tokens", 2]
    assert kvedge(*arguments, "Hello").code == 0
    saved = (tmp_path / "a.kvs").read_bytes()
    code = PRESSED_IN.format(module=module, owner=owner, method=method)
    done = kvedge(*arguments, "And now?", program=("-c", code))
    assert (done.code, done.out) == (130, "") and "Traceback" not in done.err
    assert (tmp_path / "a.kvs").read_bytes() == saved


# presses Ctrl-C at the first line that llama.cpp logs while it loads a session file
PRESSED_IN_LOG = """
import os, signal, sys
from pykvedge.chat.session import Session
load, out, armed = Session.load, sys.stderr, []
def loading(*arguments):
    armed.append(True)
    load(*arguments)
class Stderr:
    def write(self, text):
        if armed:
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return out.write(text)
    def __getattr__(self, name):
        return getattr(out, name)
Session.load, sys.stderr = loading, Stderr()
from pykvedge.cli import program
program.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_while_a_file_is_loaded_and_logged_ends_the_program(kvedge, tiny, tmp_path):
    arguments = ["chat", *tiny("llama").arguments(), "--session", tmp_path / "a.kvs", "--max-tokens", 2]
    assert kvedge(*arguments, "Hello").code == 0
    done = kvedge(*arguments, "--verbose", "And now?", program=("-c", PRESSED_IN_LOG))
    assert (done.code, done.out) == (130, "") and "Traceback" not in done.err


def test_ctrl_c_while_a_line_is_logged_comes_after_the_call(monkeypatch):
    class Pressed:
        def write(self, text):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Pressed())
    monkeypatch.setattr(llamacpp._log, "verbose", True)
    done = []
    with pytest.raises(KeyboardInterrupt), llamacpp.collected_errors():
        llamacpp._log.receive(2, b"a line", None)  # as llama.cpp calls it, which cannot receive exceptions
        done.append("the call")
    assert done
    with llamacpp.collected_errors():
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_progress_raises_while_a_model_is_loaded_is_raised(tiny, native, error):
    def progress(what, share):
        raise error

    with pytest.raises(error):
        pykvedge.load(tiny("llama").model, progress=progress)
