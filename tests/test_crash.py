"""A crash of native code gives one line: the reason, and the place of the conversation."""

import os
import signal
import subprocess
import sys

import httpx
import pytest
from server import QUESTION, SCENES, asks, serving
from test_interactive import Terminal

from pykvedge.native import libraries

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the crashes here are made with means of POSIX")

# a scorer that crashes after `calls` layers
SCORER = """
import ctypes, os
import pykvedge
calls = []
@pykvedge.scorer("crashing", recent=0)
def crashing(layer, settings):
    calls.append(layer.index)
    if len(calls) > {calls}:
        {crash}
    return layer.k[..., 0]
"""
READS_NOWHERE = "ctypes.string_at(8)"
ASSERTS = "ctypes.CDLL({library!r}).ggml_abort(b'ggml.c', 7, b'GGML_ASSERT(%s) failed', b'n > 0')"
TERMINATES = "ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()"


def options(model, plugin, *more):
    return ["chat", *model.arguments(), "--plugin", plugin, "--method", "crashing", "--budget", "0.3", *more]


def crashing(write, crash, calls=0):
    library = str(libraries.library_dir() / libraries.file_name("ggml-base"))
    return write(SCORER.format(crash=crash.format(library=library), calls=calls), "crashing.py")


LONG = "And what is that over there, behind the house? " * 3


@pytest.mark.parametrize(("crash", "words"), [
    (READS_NOWHERE, "native code crashed: segmentation fault"),
    (TERMINATES, "native code crashed: an uncaught exception"),
    (ASSERTS, "llama.cpp had to stop: GGML_ASSERT(n > 0) failed"),
])  # fmt: skip
def test_one_line_says_what_happened(kvedge, tiny, write, tmp_path, crash, words):
    asked = ["--session", tmp_path / "not-there-yet.kvs", "--json", "Hello there, what is this?"]
    kvedge(*options(tiny("llama"), crashing(write, crash), *asked)).failed(
        1, f"{words}; everything that was not saved is lost"
    )


def test_the_conversation_is_where_the_line_says(kvedge, tiny, write, tmp_path):
    """The first question of a run is in the file; the question at which the next run crashes is not."""
    model, file, plugin = tiny("llama"), tmp_path / "talk.kvs", crashing(write, READS_NOWHERE)
    more = ["--session", file, "--max-tokens", 2, "--quiet"]
    assert kvedge("chat", *model.arguments(), *more, "Hello there.").code == 0
    before = file.read_bytes()
    done = kvedge(*options(model, plugin, *more, LONG))
    done.failed(1, f"segmentation fault; the conversation up to its last saved answer is in {file}")
    assert file.read_bytes() == before
    report = kvedge("chat", *model.arguments(), *more, "--json", "And after it?").json
    assert report["session"]["turns"] == 2 and [p.name for p in tmp_path.glob("talk*")] == ["talk.kvs"]


def test_a_conversation_at_a_terminal(environment, tiny, write, tmp_path, kvedge):
    """Both layers of the first message pass, the second message crashes. The terminal is restored."""
    termios = pytest.importorskip("termios")
    model, file, plugin = tiny("llama"), tmp_path / "talk.kvs", crashing(write, READS_NOWHERE, calls=2)
    arguments = options(model, plugin, "--session", file, "--max-tokens", 4, "--no-history")
    terminal = Terminal(arguments, {**environment, "TERM": "xterm"})
    try:
        before = termios.tcgetattr(terminal.fd)
        terminal.wait_for("> ")
        terminal.type(f"{LONG}\n")
        terminal.answer()
        terminal.type(f"{LONG}\n")
        terminal.wait_for("kvedge: error: native code crashed: segmentation fault; ")
        terminal.wait_for(f"is in {file}")
        assert termios.tcgetattr(terminal.fd) == before
        assert terminal.exit_code() == 1
    finally:
        terminal.close()
    report = kvedge(*options(model, plugin, "--session", file, "--max-tokens", 2, "--json", "Again?")).json
    assert report["session"]["turns"] == 2


def test_a_model_file_that_becomes_shorter_while_it_is_used(environment, tiny, tmp_path):
    """As on a network disk: pages of the file vanish, and a thread of ggml reads them."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny("llama", weight="f32").model.read_bytes())
    program = (sys.executable, "-m", "pykvedge", "chat", "--model", path, "--threads", "2", "--max-tokens", "15000",
               "--grammar", 'root ::= "a" root', "--ctx", "16384", "Hello")  # fmt: skip
    with subprocess.Popen([*map(str, program)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          stdin=subprocess.DEVNULL, text=True) as running:  # fmt: skip
        assert running.stdout.read(1) == "a"
        os.truncate(path, 4096)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    last = said.splitlines()[-1]
    assert last.startswith("kvedge: error: native code crashed: bus error")


def test_a_server(environment, write, tmp_path):
    """A waiting client gets an error. The server prints nothing but the line with its address."""
    park = tmp_path / "park"
    more = ["--plugin", crashing(write, READS_NOWHERE), "--ctx", "1024", "--park", park]
    with serving(environment, *more) as server:
        server.text(asks(QUESTION))
        with pytest.raises(httpx.HTTPError):
            server.chat(asks(QUESTION, SCENES[0]), kvedge={"method": "crashing", "budget": 0.3})
        out, err = server.process.communicate(timeout=60)
        assert server.process.returncode == 1 and not out
    line = err.splitlines()[-1]
    assert line.startswith("kvedge: error: native code crashed: segmentation fault; ")
    assert line.endswith(f"the conversations in {park} are kept for the next start")


def test_only_the_program_tells(environment, kvedge, tiny, write):
    """No line for a debugging user (KVEDGE_DEBUG), nor for programs that use the package: they own their signals."""
    plugin = crashing(write, READS_NOWHERE)
    done = kvedge(*options(tiny("llama"), plugin, "Hello there."), env={"KVEDGE_DEBUG": "1"})
    assert done.code == -signal.SIGSEGV and "crashed" not in done.err
    code = (
        "import ctypes, json, sys, pykvedge\n"
        "with pykvedge.Session(sys.argv[1], None, pykvedge.plan('full'), threads=1) as session:\n"
        "    session.ask('Hello').close()\n"
        "    ctypes.string_at(8)\n"
    )
    done = kvedge(tiny("llama").model, program=("-c", code))
    assert done.code == -signal.SIGSEGV and done.err == ""
