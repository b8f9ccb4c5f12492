"""A cache folder returns exactly the stored entries, after any change of the files, for any number of processes."""

import errno
import hashlib
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib
from functools import partial

import pytest
from threads import in_threads

from pykvedge.caches.folder import CacheFolder
from pykvedge.errors import UsageError

KEY = hashlib.sha256(b"a").hexdigest()
DATA = bytes(random.Random(1).randbytes(300))
ONLY_POSIX = pytest.mark.skipif(os.name != "posix", reason="modes, pipes and signals of POSIX")


def key(i) -> str:
    return hashlib.sha256(str(i).encode()).hexdigest()


def got(folder, kind="images", of=KEY):
    found = folder.get(kind, of)
    return None if found is None else bytes(found)


@pytest.fixture
def folder(tmp_path):
    return CacheFolder(tmp_path / "cache", 1 << 20)


@pytest.fixture
def entry(folder):
    """The file of one entry that holds DATA."""
    folder.put("images", KEY, [DATA[:100], bytearray(DATA[100:150]), memoryview(DATA)[150:]])
    (file,) = folder.path.iterdir()
    return file


def test_what_is_put_is_got(folder, tmp_path):
    assert got(folder) is None
    for data in (DATA, b"", bytes(100_000)):
        folder.put("images", KEY, [data])
        assert got(folder) == data == got(CacheFolder(folder.path, 1 << 20))
    numbers = struct.pack("<3f", 1.0, -0.5, 3e38)
    folder.put("prompts", KEY, iter([memoryview(numbers).cast("f"), memoryview(b"").cast("B")]))
    assert got(folder, "prompts") == numbers and got(folder) == bytes(100_000)
    assert got(folder, of=key(1)) is None and folder.notes() == []
    assert folder.total_bytes() == sum(file.stat().st_size for file in folder.path.iterdir())
    assert not list(folder.path.glob("*.part"))


def test_an_entry_is_laid_out_as_documented(entry):
    """The layout of docs/dev/formats.txt, read without the code that writes it."""
    raw, name = entry.read_bytes(), f"images-{KEY}".encode()
    assert entry.name == f"images-{KEY}.kvc"
    head = raw[:28]
    assert head[:8] == b"kvedgec\x1a"
    assert struct.unpack("<IIQI", head[8:]) == (1, len(name), len(DATA), zlib.crc32(DATA))
    assert struct.unpack("<I", raw[28:32]) == (zlib.crc32(head + name),)
    assert raw[32:] == name + DATA


@ONLY_POSIX
def test_only_the_owner_may_read(folder, entry):
    assert folder.path.stat().st_mode & 0o777 == 0o700 and entry.stat().st_mode & 0o777 == 0o600


def test_names_and_limits_that_cannot_be(folder, tmp_path):
    for kind, of in [("../x", KEY), ("images", "../../etc"), ("Images", KEY), ("images", ""), ("", KEY), ("a b", KEY)]:
        with pytest.raises(UsageError):
            folder.get(kind, of)
        with pytest.raises(UsageError):
            folder.put(kind, of, [b"1"])
    with pytest.raises(UsageError, match="at least 1 byte"):
        CacheFolder(tmp_path / "b", 0)
    assert not list(folder.path.iterdir())


# ------------------------------------------------------------------------------------------------------------
# Damage


def test_every_changed_byte_is_found(folder, entry):
    whole = entry.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 128):
            entry.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            assert got(folder) is None, at
            assert not entry.exists(), at
    entry.write_bytes(whole)
    assert got(folder) == DATA  # without the change, the entry is valid
    (note,) = folder.notes()
    assert "damaged" in note and str(folder.path) in note and folder.notes() == []


def test_a_file_of_another_length_is_found(folder, entry):
    whole = entry.read_bytes()
    for raw in [*(whole[:n] for n in range(len(whole))), whole + b"\0", whole * 2]:
        entry.write_bytes(raw)
        assert got(folder) is None, len(raw)


def test_entries_that_are_not_the_one_asked_for(folder, entry):
    """Other version, name or kind, or no entry at all: correct checksums do not make it valid."""
    whole, name = entry.read_bytes(), f"images-{KEY}".encode()
    head = whole[:8] + struct.pack("<I", 2) + whole[12:28]
    entry.write_bytes(head + struct.pack("<I", zlib.crc32(head + name)) + whole[32:])
    assert got(folder) is None and "from another version" in folder.notes()[0]
    for other in (f"images-{key(2)}.kvc", f"prompts-{KEY}.kvc"):
        entry.with_name(other).write_bytes(whole)
    assert got(folder, of=key(2)) is None and got(folder, "prompts") is None
    entry.write_text("somebody's notes")
    assert got(folder) is None
    folder.put("images", KEY, [DATA])
    assert got(folder) == DATA


def test_a_size_that_lies_asks_for_no_memory(folder, entry):
    """A header with correct checksums states more bytes than the file has."""
    whole, name = entry.read_bytes(), f"images-{KEY}".encode()
    head = whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:28]
    entry.write_bytes(head + struct.pack("<I", zlib.crc32(head + name)) + whole[32:])
    assert got(folder) is None and not entry.exists()


@ONLY_POSIX
def test_what_is_no_file_is_no_entry(folder, entry, tmp_path):
    entry.unlink()
    os.mkfifo(entry)
    assert got(folder) is None and not folder.entries("images")
    entry.unlink()
    entry.mkdir()
    assert got(folder) is None
    folder.put("images", KEY, [DATA])
    assert got(folder) is None and len(folder.notes()) >= 1 and entry.is_dir()


@ONLY_POSIX
@pytest.mark.parametrize("to", ["other", "itself", "nothing", "/dev/zero"])
def test_a_link_among_the_entries_is_removed_alone(folder, entry, tmp_path, to):
    folder.put("images", "0a", [b"other"])
    (tmp_path / "other").write_bytes(entry.read_bytes())
    entry.unlink()
    entry.symlink_to({"other": tmp_path / "other", "itself": entry, "nothing": tmp_path / "none"}.get(to, to))
    assert set(folder.entries("images")) == {"0a"}
    assert got(folder) is None and not entry.is_symlink() and "a symbolic link and was removed" in folder.notes()[0]
    assert bytes(folder.get("images", "0a")) == b"other" and (tmp_path / "other").exists()
    folder.put("images", KEY, [DATA])
    assert got(folder) == DATA and not folder.notes()


# ------------------------------------------------------------------------------------------------------------
# The bound


def test_those_used_least_recently_go_first(tmp_path):
    size = 32 + len(f"images-{KEY}") + 1000
    folder = CacheFolder(tmp_path / "c", 3 * size)
    for i in range(3):
        folder.put("images", key(i), [bytes(1000)])
        os.utime(folder.path / f"images-{key(i)}.kvc", (1000 + i, 1000 + i))
    assert got(folder, of=key(0)) is not None  # this entry is now the last used
    folder.put("images", key(3), [bytes(1000)])
    assert [i for i in range(4) if got(folder, of=key(i)) is not None] == [0, 2, 3]
    folder.put("prompts", KEY, [bytes(2 * 1000)])  # all kinds share the limit
    assert folder.total_bytes() <= 3 * size and got(folder, "prompts") == bytes(2000)


def test_an_entry_above_the_limit_is_not_stored(tmp_path):
    folder = CacheFolder(tmp_path / "c", 2000)
    folder.put("images", key(1), [bytes(100)])
    asked = []

    def parts():
        for i in range(1000):
            asked.append(i)
            yield bytes(1000)

    folder.put("images", KEY, parts())
    assert got(folder) is None and got(folder, of=key(1)) is not None
    assert len(asked) <= 3 and len(list(folder.path.iterdir())) == 1
    (note,) = folder.notes()
    assert str(folder.path) in note and "an entry was not saved, because it is larger than the limit of" in note


def test_a_folder_that_was_larger_before_shrinks(tmp_path):
    before = CacheFolder(tmp_path / "c", 1 << 20)
    for i in range(20):
        before.put("images", key(i), [bytes(1000)])
    assert CacheFolder(tmp_path / "c", 5000).total_bytes() <= 5000
    assert before.total_bytes() > 3000


def test_what_others_keep_there_stays(folder):
    for name in ("notes.txt", "images.kvc", f"images-{KEY}.txt", "images-xyz.kvc", "a.part"):
        (folder.path / name).write_bytes(bytes(2 << 20))
    folder.put("images", KEY, [DATA])
    assert got(folder) == DATA and len(list(folder.path.iterdir())) == 6


# ------------------------------------------------------------------------------------------------------------
# Folders that cannot be used


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "c").write_text("mine")
    for path in (tmp_path / "c", tmp_path / "c" / "below", tmp_path / "zero\0byte"):
        folder = CacheFolder(path, 1 << 20)
        for _ in range(3):
            folder.put("images", KEY, [DATA])
            assert got(folder) is None
        (note,) = folder.notes()
        assert "nothing is cached" in note and "\n" not in note and "\0" not in note
    assert (tmp_path / "c").read_text() == "mine"


@ONLY_POSIX
def test_a_folder_that_must_not_be_written_is_read(environment, folder, entry, tmp_path):
    """A read-only folder is not made smaller either. Root can write everywhere, so the program changes its user."""
    code = (
        "import os, sys\nfrom pykvedge.caches.folder import CacheFolder\n"
        "if os.geteuid() == 0:\n    os.seteuid(65534)\n"
        "small, folder = CacheFolder('cache', 1), CacheFolder('cache', 1 << 20)\n"
        "small.put('images', 'a', [b''])\nfolder.put('images', 'a', [b'1'])\nfolder.put('images', 'b', [b'1'])\n"
        "print(folder.get('images', sys.argv[1]) is not None, folder.get('images', 'a'), len(folder.notes()))"
    )
    tmp_path.chmod(0o755)
    entry.chmod(0o644)
    folder.path.chmod(0o555)
    try:
        done = subprocess.run([sys.executable, "-c", code, KEY], cwd=tmp_path, capture_output=True, text=True,
                              env=environment)  # fmt: skip
    finally:
        folder.path.chmod(0o700)
    assert done.stdout.strip() == "True None 1", done
    assert got(folder) == DATA


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "fsync"])
def test_what_the_system_refuses_is_told_once(folder, entry, monkeypatch, call, error):
    real = getattr(os, call)

    def refuse(what, flags=0, *more):
        if call == "fsync" or flags & os.O_CREAT:
            raise OSError(error, os.strerror(error))
        return real(what, flags, *more)

    monkeypatch.setattr(os, call, refuse)
    for i in range(3):
        folder.put("images", key(i), [DATA])
    (note,) = folder.notes()
    assert os.strerror(error).lower() in note
    monkeypatch.undo()
    assert got(folder) == DATA and [p.name for p in folder.path.iterdir()] == [entry.name]


@ONLY_POSIX
def test_a_disk_that_fills_up(environment, tmp_path):
    """The system stops the writing of an entry: earlier entries stay, and no half-written entry does."""
    code = (
        "import resource, sys\nfrom pykvedge.caches.folder import CacheFolder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "folder = CacheFolder(sys.argv[1], 1 << 20)\n"
        "for i in range(4):\n    folder.put('images', f'{i:x}', [bytes(20_000)] * (1 + i))\n"
        "print([folder.get('images', f'{i:x}') is not None for i in range(4)], len(folder.notes()))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "c"], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[True, True, False, False] 1", done
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_a_folder_that_goes_away(folder, entry):
    entry.unlink()
    folder.path.rmdir()
    folder.put("images", KEY, [DATA])
    assert got(folder) is None and len(folder.notes()) == 1


# ------------------------------------------------------------------------------------------------------------
# Several at once

WORKER = """
import hashlib, random, sys
from pykvedge.caches.folder import CacheFolder
folder, seed, rounds, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
folder, draw, wrong, found = CacheFolder(folder, limit), random.Random(seed), 0, 0
print("ready", flush=True)
for _ in range(rounds):
    i = draw.randrange(30)
    key, data = hashlib.sha256(str(i).encode()).hexdigest(), random.Random(i).randbytes(2000 + 500 * i)
    data_now = folder.get("images", key)
    found += data_now is not None
    wrong += data_now is not None and data_now != data
    if data_now is None:
        folder.put("images", key, (data[n : n + 700] for n in range(0, len(data), 700)))
print(wrong, found, folder.notes())
"""


def worker(environment, path, seed, rounds, limit):
    command = [sys.executable, "-c", WORKER, str(path), str(seed), str(rounds), str(limit)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_several_processes_share_a_folder(environment, tmp_path):
    """No process reads a partial or removed entry, and the limit holds except for entries being written."""
    limit, largest, n = 100_000, 2000 + 500 * 29 + 110, 4
    children = [worker(environment, tmp_path / "c", seed, 150, limit) for seed in range(n)]
    watching, folder = [], CacheFolder(tmp_path / "c", limit)
    while any(child.poll() is None for child in children):
        watching.append(folder.total_bytes())
        time.sleep(0.01)
    for child in children:
        wrong, found, notes = child.communicate()[0].split(maxsplit=2)
        assert child.returncode == 0 and (int(wrong), notes.strip()) == (0, "[]") and int(found) > 0
    assert max(watching) <= limit + n * largest and folder.total_bytes() <= limit
    assert not list((tmp_path / "c").glob("*.part"))


def test_threads_share_a_folder(tmp_path):
    folder = CacheFolder(tmp_path / "c", 20_000)
    wrong = []

    def work(seed):
        draw = random.Random(seed)
        for _ in range(60):
            i = draw.randrange(8)
            data = random.Random(i).randbytes(4000)
            if (found := got(folder, of=key(i))) is not None and found != data:
                wrong.append(i)
            folder.put("images", key(i), [data])

    in_threads(*(partial(work, i) for i in range(4)))
    assert not wrong and folder.notes() == [] and folder.total_bytes() <= 20_000


@ONLY_POSIX
def test_a_killed_writer_leaves_nothing_that_counts(environment, tmp_path):
    """A writer killed during an entry leaves no entry. Earlier entries stay; the next writer removes the rest."""
    code = (
        "import sys, time\nfrom pykvedge.caches.folder import CacheFolder\n"
        "def parts():\n    yield bytes(1 << 20)\n    print('half', flush=True)\n    time.sleep(600)\n"
        "CacheFolder(sys.argv[1], 1 << 30).put('images', sys.argv[2], parts())"
    )
    folder = CacheFolder(tmp_path / "c", 1 << 30)
    folder.put("images", KEY, [DATA])
    child = subprocess.Popen([sys.executable, "-c", code, folder.path, KEY], stdout=subprocess.PIPE, env=environment)
    try:
        assert child.stdout is not None and child.stdout.readline().strip() == b"half"
        assert len(list(folder.path.glob("*.part"))) == 1
        folder.put("images", key(2), [DATA])
        assert len(list(folder.path.glob("*.part"))) == 1  # the writer still lives
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert got(folder) == DATA
    folder.put("images", key(3), [DATA])
    assert sorted(p.suffix for p in folder.path.iterdir()) == [".kvc"] * 3


def test_what_was_left_long_ago_goes_although_the_number_is_another_process_now(folder):
    numbers = (f"{os.getpid()}-1", f"{os.getpid()}-2", "9999999999-1")
    old, new, odd = (folder.path / f"images-{KEY}.{n}.part" for n in numbers)
    for file in (old, new, odd):
        file.write_bytes(b"1")
    os.utime(old, (time.time() - 3600,) * 2)
    folder.put("images", KEY, [DATA])
    assert not old.exists() and new.exists() and not odd.exists()
