"""A folder of what was computed once, for later runs and for other programs at the same time (`--cache DIR`).

Every entry is a file. It is written beside its name and renamed when it is complete, so that nobody reads half of one,
and it carries checksums, so that a damaged one is as good as none. No trouble with the folder ends a conversation: what
cannot be read is computed again, what cannot be written is not kept, and a note says so once.
docs/dev/formats.txt has the layout of the files.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from pykvedge.errors import UsageError, printable
from pykvedge.system.memory import is_running, readable

Bytes: TypeAlias = bytes | bytearray | memoryview

_MAGIC, _VERSION = b"kvedgec\x1a", 1
_HEAD = struct.Struct("<8sIIQII")  # magic, version, bytes of name and payload, CRC-32 of the payload and of all else
_HEAD_CRC = struct.Struct("<I")
_NAME = r"(?P<kind>[a-z]{1,32})-(?P<key>[0-9a-f]{1,128})"
_ENTRY = re.compile(rf"{_NAME}\.kvc")
_PART = re.compile(rf"{_NAME}\.(?P<process>\d{{1,10}})-\d{{1,10}}\.part")  # process, and its how manieth
_LEFT_S = 600.0  # seconds after which nobody writes on; the number of a dead process may be another's by then
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_counter = itertools.count()  # of a process, so that folders of the same path never share a file that is being written


class CacheFolder:
    """A folder of entries, bounded in bytes, the least recently used of which go first.

    Threads and processes may share a folder. Beyond the bound there is at most the one entry that each is writing.
    """

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int, durable: bool = True) -> None:
        """Makes the folder, for its owner alone, if there is none. Raises UsageError for a limit below 1.

        limit_bytes: of all files of entries together, whatever their kind. durable: an entry is on the disk before it
        has its name; without, what a machine that stops damages is found by its checksum, and writing takes far less.
        """
        if limit_bytes < 1:
            raise UsageError(f"a cache folder must be allowed at least 1 byte, not {limit_bytes}")
        self.path, self.limit_bytes, self._durable = Path(path), limit_bytes, durable
        self._lock = threading.Lock()  # of the notes
        self._said: set[str] = set()
        self._notes: list[str] = []
        self._usable = self._prepare()

    def get(self, kind: str, key: str) -> memoryview | None:
        """Returns the bytes of an entry, None where there is none that is whole.

        kind: a word of small letters, as in "images". key: hexadecimal digits. Raises UsageError for others.
        """
        name, file = self._place(kind, key)
        if not self._usable:
            return None
        try:
            handle = os.open(file, _FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link, which kvedge makes none of
                self._drop(file, "a link")
            else:
                self._note("read", f"an entry cannot be read: {_reason(error)}; what it held is computed again")
            return None
        try:
            with os.fdopen(handle, "rb", buffering=0) as stream:
                payload = _read(stream, name.encode(), self.limit_bytes)
        except (OSError, MemoryError):
            return None
        except ValueError as error:
            self._drop(file, str(error))
            return None
        with suppress(OSError):  # a folder that must not be written
            os.utime(file)
        return payload

    def put(self, kind: str, key: str, parts: Iterable[Bytes]) -> None:
        """Stores the parts, one after the other, as an entry, in place of an older one; then makes room.

        They are asked for one at a time. What is larger than the limit is not stored, which a note says. Raises
        UsageError as get does.
        """
        name, file = self._place(kind, key)
        if not self._usable:
            return
        part = file.with_name(f"{name}.{os.getpid()}-{next(_counter)}.part")
        try:
            if self._write(part, name.encode(), parts):
                _rename(part, file)
                self.make_room()
            else:
                most = f"{readable(self.limit_bytes)}, the most that the folder may take"
                self._note("large", f"an entry alone is larger than {most}; what is so large is not kept")
        except FileNotFoundError:
            # the folder went away, or another host took the file for one that was left
            self._note("gone", "what was written there is gone; it is not kept")
        except OSError as error:
            self._note("write", f"{_reason(error)}; what is new is not kept")
        finally:
            with suppress(OSError):
                part.unlink()

    def make_room(self) -> None:
        """Removes what killed writers left, and the entries used least recently as long as there are too many bytes."""
        entries = []
        for name, facts in self._files():
            if _ENTRY.fullmatch(name):
                entries.append((facts.st_mtime_ns, self.path / name, facts.st_size))
            elif (part := _PART.fullmatch(name)) and _is_left(int(part["process"]), facts.st_mtime):
                with suppress(OSError):
                    (self.path / name).unlink()
        total = sum(size for _, _, size in entries)
        for _, path, size in sorted(entries):
            if total <= self.limit_bytes:
                return
            try:
                path.unlink()
            except FileNotFoundError:
                pass  # another process removed it
            except OSError:
                continue  # a folder that must not be written can still be read
            total -= size

    def total_bytes(self) -> int:
        return sum(facts.st_size for name, facts in self._files() if _ENTRY.fullmatch(name))

    def entries(self, kind: str) -> dict[str, tuple[int, float]]:
        """Lists the entries of a kind: the bytes of each, and when it was last used, in seconds since 1970."""
        found = [(_ENTRY.fullmatch(name), facts) for name, facts in self._files()]
        return {name["key"]: (facts.st_size, facts.st_mtime) for name, facts in found if name and name["kind"] == kind}

    def remove(self, kind: str, key: str) -> bool:
        """Removes an entry; False is returned where there is none. Raises UsageError as get does."""
        try:
            self._place(kind, key)[1].unlink()
        except OSError:
            return False
        return True

    def notes(self) -> list[str]:
        """Returns what went wrong since the last call, a line for each kind of trouble, which is told once."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def _files(self) -> list[tuple[str, os.stat_result]]:
        """Lists the regular files in the folder, but those that another process removes meanwhile."""
        out = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(facts.st_mode):
                        out.append((entry.name, facts))
        return out

    def _prepare(self) -> bool:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.make_room()
        except FileExistsError:
            self._note("prepare", "it is no folder; nothing is kept there")
            return False
        except (OSError, ValueError) as error:
            self._note("prepare", f"{_reason(error)}; nothing is kept there")
            return False
        return True

    def _place(self, kind: str, key: str) -> tuple[str, Path]:
        name = f"{kind}-{key}"
        if not re.fullmatch(_NAME, name):
            raise UsageError(f"an entry of a cache folder cannot be called {name!r:.200}")
        return name, self.path / f"{name}.kvc"

    def _write(self, file: Path, name: bytes, parts: Iterable[Bytes]) -> bool:
        """Writes a file that becomes an entry; False is returned where it would not fit into the folder even alone."""
        size, checksum = 0, 0
        with os.fdopen(os.open(file, _NEW, 0o600), "wb") as stream:
            stream.write(bytes(_HEAD.size) + name)  # what the head says is known at the end
            for part in parts:
                view = memoryview(part)
                if not view.nbytes:
                    continue  # which cannot be cast where it has a shape
                data = view.cast("B")
                size += len(data)
                if _HEAD.size + len(name) + size > self.limit_bytes:
                    return False
                checksum = zlib.crc32(data, checksum)
                stream.write(data)
            stream.seek(0)
            stream.write(_head(name, size, checksum))
            stream.flush()
            if self._durable:
                os.fsync(stream.fileno())
        return True

    def _drop(self, file: Path, what: str) -> None:
        with suppress(OSError):
            file.unlink()
        self._note("damaged", f"an entry is {what} and was removed; what it held is computed again")

    def _note(self, kind: str, what: str) -> None:
        with self._lock:
            if kind not in self._said:
                self._said.add(kind)
                self._notes.append(printable(f"the cache folder {self.path}: {what}"))


def _head(name: bytes, size: int, checksum: int) -> bytes:
    head = _HEAD.pack(_MAGIC, _VERSION, len(name), size, checksum, 0)[: -_HEAD_CRC.size]
    return head + _HEAD_CRC.pack(zlib.crc32(name, zlib.crc32(head)))


def _read(stream: Any, name: bytes, limit: int) -> memoryview | None:
    """Reads the payload of an open entry, None of what is no file. Raises ValueError for another one: what it is."""
    facts = os.fstat(stream.fileno())
    if not stat.S_ISREG(facts.st_mode):
        return None
    before = _HEAD.size + len(name)
    data = stream.read(before)
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise ValueError("damaged")
    _, version, name_bytes, size, checksum, _ = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise ValueError("of another version of kvedge")
    # sizes that agree with the file come before any memory is asked for
    if data != _head(name, size, checksum) + name or name_bytes != len(name) or facts.st_size != before + size:
        raise ValueError("damaged")
    if facts.st_size > limit:
        raise ValueError("larger than the folder may be")
    payload = memoryview(bytearray(size))
    got = 0
    while got < size and (n := stream.readinto(payload[got:])):
        got += n
    if got < size or zlib.crc32(payload) != checksum:
        raise ValueError("damaged")
    return payload.toreadonly()


def _rename(part: Path, file: Path) -> None:
    try:
        part.replace(file)
    except PermissionError:
        if os.name != "nt" or not file.exists():  # Windows keeps what somebody reads: the same entry
            raise


def _is_left(process: int, written: float) -> bool:
    return time.time() - written > _LEFT_S or not is_running(process)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
