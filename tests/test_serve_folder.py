"""The server's folder for parked conversations: removed at its end, or by the next server after a kill."""

import sys

import pytest
from server import QUESTION, SCENES, asks, serving

from pykvedge.caches.folder import CacheFolder
from pykvedge.errors import KvedgeError
from pykvedge.serve import server as serving_process
from pykvedge.serve.parked import Park


def folders(root):
    return sorted(path.name for path in root.iterdir() if path.name.startswith("kvedge-park-"))


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_what_a_killed_server_left_goes_when_the_next_one_begins(environment, tmp_path):
    environment = {**environment, "TMPDIR": str(tmp_path)}
    flags = ("--ctx", "1024", "--memory", "1MiB")
    with serving(environment, *flags) as lives:
        assert lives.text(asks(QUESTION, SCENES[0]))
        with serving(environment, *flags) as server:
            assert server.text(asks(QUESTION, SCENES[0]))
            both = folders(tmp_path)
            assert len(both) == 2
            server.process.kill()
            server.process.wait()
        assert folders(tmp_path) == both
        with serving(environment, *flags) as server:
            now = folders(tmp_path)
            assert len(now) == 2 and len(set(now) & set(both)) == 1  # the folder of the live server, and the new one
            assert server.end()[0] == 0
        assert folders(tmp_path) == [name for name in both if name in now]
        assert lives.text(asks(QUESTION, SCENES[1]))


def test_what_is_not_a_servers_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(serving_process.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "kvedge-park-made").mkdir()  # just made, without a lock yet
    (tmp_path / "kvedge-park-file").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").write_text("")
    (tmp_path / "kvedge-park-link").symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.iterdir())
    with serving_process.own_folder() as folder:
        assert folder.parent == tmp_path and (sys.platform == "win32" or folder.stat().st_mode & 0o77 == 0)
        with serving_process.own_folder():
            assert folder.exists()
    assert sorted(tmp_path.iterdir()) == before


def test_no_folder_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(serving_process.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(KvedgeError, match="--park DIR"), serving_process.own_folder():
        raise AssertionError("there is none")


class Rows(bytes):
    """Bytes that represent a conversation."""

    def encode(self):
        return [self]


def test_the_first_conversation_that_does_not_fit_the_folder_is_told_at_once(tmp_path):
    told = []
    park = Park(CacheFolder(tmp_path / "park", 1000), told.append)
    for n, name in enumerate(("a" * 64, "b" * 64)):
        park.put(name, Rows(5000))
        assert len(told) == min(n, 1)
        park.shrink(0)
        assert park.get(name) is None and len(told) == 1 and "larger than" in told[0]


def test_a_conversation_that_was_damaged_in_the_folder_is_told_at_once(tmp_path):
    told = []
    park = Park(CacheFolder(tmp_path / "park", 1 << 20), told.append)
    park.put("a" * 64, Rows(5000))
    park.shrink(0)
    [file] = (tmp_path / "park").glob("*.kvc")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert not told and park.get("a" * 64) is None
    assert len(told) == 1 and "was removed" in told[0]
