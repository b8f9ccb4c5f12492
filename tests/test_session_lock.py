"""A session file serves one program at a time; links, read-only files, modes and leftovers of killed programs."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from conversations import a_plan, say
from threads import in_threads

from pykvedge.errors import SessionFileError
from pykvedge.runtime import sessionlock
from pykvedge.runtime.sessionlock import SessionLock

ONLY_POSIX = pytest.mark.skipif(os.name != "posix", reason="links and modes of files")


def arguments(model, file, *more):
    return ["chat", *model.arguments(), "--session", file, "--max-tokens", 2, "--json", *more]


def test_the_second_program_is_told_and_no_turn_is_lost(kvedge, tiny, tmp_path):
    """Two programs ask three questions each with one file: every answered question is in the file at the end."""
    model, file = tiny("llama"), tmp_path / "talk.kvs"
    answered, refused = [], []

    def ask(name):
        for i in range(3):
            done = kvedge(*arguments(model, file, f"Question {name}{i}"))
            if done.code == 0:
                answered.append(done.json["session"]["turns"])
            else:
                done.failed(1, "talk.kvs is in use by another kvedge", "wait until the other kvedge ends")
                refused.append(name)

    in_threads(*(partial(ask, name) for name in "ab"))
    assert sorted(answered) == list(range(1, len(answered) + 1)) and len(answered) + len(refused) == 6
    last = kvedge(*arguments(model, file, "And now?")).json["session"]
    assert last["turns"] == len(answered) + 1
    assert [p.name for p in tmp_path.iterdir()] == ["talk.kvs"]


def test_who_holds_a_file_is_named(tmp_path):
    with SessionLock(tmp_path / "a.kvs"):
        with pytest.raises(SessionFileError, match=f"in use by another kvedge .process {os.getpid()}."):
            SessionLock(tmp_path / "a.kvs")
        SessionLock(tmp_path / "b.kvs").close()
    SessionLock(tmp_path / "a.kvs").close()
    assert not list(tmp_path.iterdir())


def test_a_killed_program_holds_nothing(environment, tmp_path):
    code = (
        "import sys, time\nfrom pykvedge.runtime.sessionlock import SessionLock\n"
        "held = SessionLock(sys.argv[1])\nprint('held', flush=True)\ntime.sleep(600)"
    )
    file = tmp_path / "a.kvs"
    child = subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE, env=environment)
    try:
        assert child.stdout is not None and child.stdout.readline().strip() == b"held"
        with pytest.raises(SessionFileError, match=f"process {child.pid}"):
            SessionLock(file)
    finally:
        child.kill()
        child.communicate()
    SessionLock(file).close()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """The previous holder removes the file after it was opened and before it is locked."""
    try_lock, times = sessionlock.try_lock, []

    def removed_first(handle):
        if not times:
            (tmp_path / "a.kvs.lock").unlink()
        times.append(handle)
        try_lock(handle)

    monkeypatch.setattr(sessionlock, "try_lock", removed_first)
    with SessionLock(tmp_path / "a.kvs"):
        assert len(times) == 2 and (tmp_path / "a.kvs.lock").exists()


def test_saving_to_a_file_that_another_program_holds(kvedge, tiny, tmp_path):
    with SessionLock(tmp_path / "held.kvs"):
        done = kvedge(
            "chat", *tiny("llama").arguments(), program=("-c", CONVERSE, "Hi", f"/save {tmp_path / 'held.kvs'}")
        )
    assert done.code == 0 and "held.kvs is in use by another kvedge" in done.err
    assert not (tmp_path / "held.kvs").exists()


# a conversation whose lines come from the arguments, because a pipe would be one prompt
CONVERSE = """
import sys
from pykvedge.cli import chat, program
from pykvedge.cli.talk.lines import Lines
lines = [*sys.argv[1:3], "/exit"]
del sys.argv[1:3]
Lines.message = lambda self, prompt, begun: lines.pop(0)
chat._question = lambda prompt: prompt
program.main()
"""


# ------------------------------------------------------------------------------------------------- the file itself


@ONLY_POSIX
def test_a_link_stays_a_link(kvedge, tiny, tmp_path):
    (tmp_path / "far").mkdir()
    link, file = tmp_path / "link.kvs", tmp_path / "far" / "talk.kvs"
    link.symlink_to("far/talk.kvs")  # its target does not exist yet
    for turns in (1, 2):
        assert kvedge(*arguments(tiny("llama"), link, "Hello")).json["session"]["turns"] == turns
        assert link.is_symlink() and file.is_file() and not file.is_symlink()
    with SessionLock(file), pytest.raises(SessionFileError, match="in use"):
        SessionLock(link)


@ONLY_POSIX
def test_a_read_only_file_is_refused_before_any_work(kvedge, tiny, tmp_path):
    model, file = tiny("llama"), tmp_path / "talk.kvs"
    assert kvedge(*arguments(model, file, "Hello")).code == 0
    before = file.read_bytes()
    file.chmod(0o444)
    missing = tmp_path / "nowhere.gguf"  # the missing model is not looked for
    kvedge("chat", "--model", missing, "--session", file, "Hello").failed(1, "talk.kvs is read-only")
    with model.session(a_plan("merged")) as session:
        say(session, "Hello")
        with pytest.raises(SessionFileError, match="read-only"):
            session.save(file)
    assert file.read_bytes() == before


@ONLY_POSIX
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_who_may_read_a_file_stays_as_it_is(tiny, native, tmp_path, mode):
    file = tmp_path / "talk.kvs"
    with tiny("llama").session(a_plan("merged")) as session:
        say(session, "Hello")
        session.save(file)
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(mode)
        session.save(file)
        assert file.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_leftovers_of_killed_programs_go_and_those_of_living_ones_stay(environment, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    stays = ["talk.kvs", f"talk.kvs.{os.getpid()}-0.part", f"other.kvs.{dead.pid}-0.part", "talk.kvs.x-0.part"]
    for name in (*stays, *(f"talk.kvs.{n}-{i}.part" for n, i in ((dead.pid, 0), (dead.pid, 12), (9999999999, 1)))):
        (tmp_path / name).write_bytes(b"half")
    with SessionLock(tmp_path / "talk.kvs"):
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*stays, "talk.kvs.lock"])
