"""Killing a program during a save: the session file is the old or the new one, and no other file remains.

After a kill, the system still writes its buffers to disk. For a power failure, native/tests/test_writes.cpp checks the
order of the writes.
"""

import sys
from pathlib import Path

import pytest
from choosing import whole

WORKER = Path(__file__).with_name("save_worker.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks a process that holds a model")
@pytest.mark.parametrize("kills", [100, *whole(1000)])
def test_kills_break_no_file_and_leave_nothing(tiny, started, native, tmp_path, kills):
    file = tmp_path / "talk.kvs"
    done = started(tiny("llama").model, file, kills, 1, program=(WORKER,), timeout=1200)
    assert done.code == 0, done.err[-2000:]
    found = done.json
    assert found["kills"] == kills
    assert min(found["parts"], found["new"]) > kills // 20, found  # kills in the middle of a save, and after a save
    assert [p.name for p in tmp_path.iterdir()] == ["talk.kvs"]
