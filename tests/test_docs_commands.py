"""The commands of the README and of docs/ run as written, and print what the pages say.

All commands of a page run in one folder, in order. The folder has the repository's folders, and model.gguf, mmproj.gguf
and pictures under the names of the pages. A local hub has the packaged model under every name that a page asks for.
`kvedge serve` starts as the page says, but on a free port; later commands use this port.
"""

import os
import re
import select
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from docpages import PAGES, ROOT, Block, blocks, fill_hub, masked, put_files
from forking import Warm
from hubs import environment as hub_environment
from hubserver import HubServer
from server import serving

SIMPLE = re.compile(r"""kvedge (?!serve )(?:[^"'|<>&;$`#\n]|"[^"$`]*"|'[^']*')*(?:#.*)?$""")
SERVE = re.compile(r"kvedge serve(?! --help)\b")
ESCAPES = re.compile(r"\x08|\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\r")
CODE = "64UM3"  # the code in examples/scene-1.png, from examples/scenes.md
RUN = [page for page in PAGES if any(b.language in ("console", "sh") and not b.reason for b in blocks(page))]


def steps(block: Block) -> list[tuple[str, str, list[str]]]:
    """Returns (command, typed lines, printed lines) of a block. Lines after `> ` are typed into a conversation."""
    text = block.text.replace("\\\n", " ")
    if block.language == "sh":
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if all(SIMPLE.match(line) or SERVE.match(line) for line in lines):
            return [(line, "", []) for line in lines]
        if SERVE.match(lines[0]):
            return [(lines[0], "", []), (block.text.partition("\n")[2], "", [])]
        return [(block.text, "", [])]
    found: list[tuple[str, list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], [], []))
        elif line.startswith("> "):
            found[-1][1].append(line[2:])
        elif line.strip():
            found[-1][2].append(line)
    return [(command, "".join(f"{line}\n" for line in typed), printed) for command, typed, printed in found]


def compared(place: str, printed: list[str], streams: list[str]) -> None:
    """Checks that every line of the page was printed, in the order of its stream. `...` matches anything."""
    rest = [[masked(line) for line in text.splitlines()] for text in streams]
    for line in printed:
        wanted = masked(line)
        begin = wanted[:-3].rstrip() if wanted.endswith("...") else ""
        for number, lines in enumerate(rest):
            fits = [i for i, got in enumerate(lines) if got == wanted or (begin and got.startswith(begin))]
            if fits:
                rest[number] = lines[fits[0] + 1 :]
                break
        else:
            assert wanted == "...", f"{place}: not printed: {line}\n" + "\n".join(streams)[-4000:]


def talk(arguments: list[str], typed: str, environment: dict[str, str]) -> tuple[int, str]:
    """Runs a conversation at a terminal of 100 columns. Returns the exit code and the text of the screen."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "pykvedge", *arguments]
    child = Warm(command, stdin=slave, stdout=slave, stderr=slave, env={**environment, "TERM": "dumb"})
    os.close(slave)
    screen, waiting, end = "", typed.splitlines(), time.monotonic() + 60
    with os.fdopen(master, "r+b", buffering=0) as terminal:
        while child.poll() is None or select.select([master], [], [], 0)[0]:
            assert time.monotonic() < end, screen
            if select.select([master], [], [], 0.1)[0]:
                try:
                    screen += ESCAPES.sub("", terminal.read(65536).decode("utf-8", "replace"))
                except OSError:  # the other end is closed
                    break
            elif waiting and screen.rstrip().endswith("\n>"):
                screen += " "  # does not match this prompt again
                terminal.write(f"{waiting.pop(0)}\r".encode())
    return child.wait(), re.sub(r"^> ", "", screen, flags=re.M)


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        fill_hub(server)
        yield server


class Desk:
    """The folder where a page's commands run, and the servers that they start."""

    def __init__(self, folder: Path, variables: dict[str, str], kvedge, environment) -> None:
        self.folder, self.kvedge, self.ports = folder, kvedge, {}
        folders = {
            "XDG_CACHE_HOME": folder / "cache",
            "XDG_CONFIG_HOME": folder,
            "KVEDGE_CONFIG": folder / "config.toml",
        }
        self.env = {"HOME": str(folder), **{name: str(path) for name, path in folders.items()}, "COLUMNS": "100"}
        self.env |= variables
        self.whole = {**environment, **self.env}
        self.whole["PATH"] = f"{Path(sys.executable).parent}:{self.whole['PATH']}"
        self.servers = ExitStack()

    def serve(self, command: str) -> None:
        words = [w for w in shlex.split(command.replace("$$", str(os.getpid())), comments=True) if w != "&"]
        asked = words.index("--port") + 1 if "--port" in words else None
        port = words[asked] if asked else "8137"
        if asked:
            words[asked] = "0"
        else:
            words += ["--port", "0"]
        server = self.servers.enter_context(
            serving(self.whole, *words[1:], "--threads", "1", program=("-m", "pykvedge"))
        )
        self.ports[port] = server.url

    def run(self, command: str, typed: str, timeout: float) -> tuple[int, list[str]]:
        """Runs a command. Returns the exit code and the outputs: [stdout, stderr], or [screen]."""
        for port, url in self.ports.items():
            command = command.replace(f"http://127.0.0.1:{port}", url)
        if SIMPLE.match(command):
            words = shlex.split(command, comments=True)[1:]
            if typed:
                code, screen = talk(words, typed, self.whole)
                return code, [screen]
            done = self.kvedge(*words, env=self.env, timeout=timeout)
            return done.code, [done.out, done.err]
        shell = subprocess.run(
            ["bash", "-ec", command], env=self.whole, capture_output=True, text=True, timeout=timeout, check=False
        )
        return shell.returncode, [shell.stdout, shell.stderr]


@pytest.fixture
def desk(tmp_path, monkeypatch, hub, kvedge, environment, native):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    made = Desk(tmp_path, hub_environment(hub, tmp_path / "hf"), kvedge, environment)
    with made.servers:
        yield made


def ran(desk: Desk, block: Block) -> None:
    for command, typed, printed in steps(block):
        if SERVE.match(command):
            desk.serve(command)
            continue
        code, streams = desk.run(command, typed, 1200 if block.is_slow else 120)
        assert code == 0, f"{block.place}: {command}\n" + "\n".join(streams)[-4000:]
        compared(f"{block.place}: {command}", printed, streams)
        asks = re.search(r"kvedge (chat|run)\b|curl", command) and "What is the code?" in command
        if asks and re.search(r"[^-]scene(-1)?\.png", command):
            found = "\n".join(streams)
            assert CODE in found, f"{block.place}: a showcase answers wrong: {command}\n{found}"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_print_what_the_page_says(page, desk):
    for block in blocks(page):
        if block.language in ("console", "sh") and not block.reason and not block.is_slow:
            ran(desk, block)


SLOW = [block for page in PAGES for block in blocks(page) if block.is_slow]


@pytest.mark.whole
@pytest.mark.parametrize("block", SLOW, ids=lambda block: block.place)
def test_slow_commands(block, desk):
    ran(desk, block)


def test_most_commands_run():
    """Most blocks must run. A block that does not run has its reason in a comment."""
    all_of = [b for page in PAGES for b in blocks(page) if b.language in ("console", "sh", "python", "c")]
    left_out = [b for b in all_of if b.reason]
    assert all(len(b.reason) > 10 for b in left_out)
    assert len(left_out) <= 40 and len(all_of) - len(left_out) >= 60, (len(left_out), len(all_of))
