"""Caches computed results in a folder, for later runs and for other programs at the same time (`--cache DIR`).

Every entry is a file. A temporary file is renamed when it is complete, so nobody reads a half-written entry. Checksums
detect damaged entries. Problems of the folder never end a conversation: unreadable entries are computed again,
unwritable entries are not kept, and a note reports each kind of problem once. Layout: docs/dev/formats.txt.
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
_HEAD = struct.Struct("<8sIIQII")  # magic, version, bytes of name and payload, CRC-32 of payload and of everything else
_HEAD_CRC = struct.Struct("<I")
_NAME = r"(?P<kind>[a-z]{1,32})-(?P<key>[0-9a-f]{1,128})"
_ENTRY = re.compile(rf"{_NAME}\.kvc")
_PART = re.compile(rf"{_NAME}\.(?P<process>\d{{1,10}})-\d{{1,10}}\.part")  # process id, and a counter of the process
_LEFT_S = 600.0  # seconds after which a temporary file is abandoned: its process id may belong to a new process
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_counter = itertools.count()  # per process, so two objects for the same folder never share a temporary file


class CacheFolder:
    """A folder of entries, limited in bytes. Removes the least recently used entries first.

    Threads and processes may share a folder. Each may exceed the limit by the entry that it is writing.
    """

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int, durable: bool = True) -> None:
        """Makes the folder if needed, readable by its owner only. Raises UsageError for a limit below 1.

        limit_bytes: of all entries together, of every kind. durable: an entry reaches the disk before it gets its name.
        False: much faster; the checksum detects damage after a crash of the machine.
        """
        if limit_bytes < 1:
            raise UsageError(f"a cache folder must be allowed at least 1 byte, not {limit_bytes}")
        self.path, self.limit_bytes, self._durable = Path(path), limit_bytes, durable
        self._lock = threading.Lock()  # guards the notes
        self._said: set[str] = set()
        self._notes: list[str] = []
        self._usable = self._prepare()

    def get(self, kind: str, key: str) -> memoryview | None:
        """Returns the bytes of an entry, or None without an intact entry.

        kind: lower-case letters, such as "images". key: hexadecimal digits. Raises UsageError for other names.
        """
        name, file = self._place(kind, key)
        if not self._usable:
            return None
        try:
            handle = os.open(file, _FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a symbolic link, which kvedge never makes
                self._drop(file, "a symbolic link")
            else:
                self._note("read", f"an entry cannot be read: {_reason(error)}; kvedge computes its data again")
            return None
        try:
            with os.fdopen(handle, "rb", buffering=0) as stream:
                payload = _read(stream, name.encode(), self.limit_bytes)
        except (OSError, MemoryError):
            return None
        except ValueError as error:
            self._drop(file, str(error))
            return None
        with suppress(OSError):  # fails in a read-only folder
            os.utime(file)
        return payload

    def put(self, kind: str, key: str, parts: Iterable[Bytes]) -> None:
        """Writes the parts as one entry, replaces an older entry, and then makes room.

        Requests the parts one at a time. Does not store an entry above the limit. Raises UsageError as get does.
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
                most = f"the limit of {readable(self.limit_bytes)} for the folder"
                self._note("large", f"an entry was not saved, because it is larger than {most}")
        except FileNotFoundError:
            # the folder was removed, or another host removed the file as abandoned
            self._note("gone", "an entry was not saved, because its file was removed while kvedge wrote it")
        except OSError as error:
            self._note("write", f"new entries cannot be saved: {_reason(error)}")
        finally:
            with suppress(OSError):
                part.unlink()

    def make_room(self) -> None:
        """Removes temporary files of killed processes, and the least recently used entries above the limit."""
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
                continue  # in a read-only folder entries stay readable
            total -= size

    def total_bytes(self) -> int:
        return sum(facts.st_size for name, facts in self._files() if _ENTRY.fullmatch(name))

    def entries(self, kind: str) -> dict[str, tuple[int, float]]:
        """Returns the entries of a kind by key: size in bytes, and last use in seconds since 1970."""
        found = [(_ENTRY.fullmatch(name), facts) for name, facts in self._files()]
        return {name["key"]: (facts.st_size, facts.st_mtime) for name, facts in found if name and name["kind"] == kind}

    def remove(self, kind: str, key: str) -> bool:
        """Removes an entry. Returns False if there is no entry. Raises UsageError as get does."""
        try:
            self._place(kind, key)[1].unlink()
        except OSError:
            return False
        return True

    def notes(self) -> list[str]:
        """Returns the problems since the last call, one line per kind of problem; reports each kind once."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def _files(self) -> list[tuple[str, os.stat_result]]:
        """Returns the regular files in the folder, except files that another process removes meanwhile."""
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
            self._note("prepare", "the path is not a folder, so nothing is cached; name a folder")
            return False
        except (OSError, ValueError) as error:
            self._note("prepare", f"the folder cannot be used, so nothing is cached: {_reason(error)}")
            return False
        return True

    def _place(self, kind: str, key: str) -> tuple[str, Path]:
        name = f"{kind}-{key}"
        if not re.fullmatch(_NAME, name):
            raise UsageError(f"an entry of a cache folder cannot be called {name!r:.200}")
        return name, self.path / f"{name}.kvc"

    def _write(self, file: Path, name: bytes, parts: Iterable[Bytes]) -> bool:
        """Writes a temporary file. Returns False if the entry alone exceeds the limit."""
        size, checksum = 0, 0
        with os.fdopen(os.open(file, _NEW, 0o600), "wb") as stream:
            stream.write(bytes(_HEAD.size) + name)  # the head is written at the end, when size and checksum are known
            for part in parts:
                view = memoryview(part)
                if not view.nbytes:
                    continue  # an empty array with a shape cannot be cast
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
        self._note("damaged", f"an entry is {what} and was removed; kvedge computes its data again")

    def _note(self, kind: str, what: str) -> None:
        with self._lock:
            if kind not in self._said:
                self._said.add(kind)
                self._notes.append(printable(f"the cache folder {self.path}: {what}"))


def _head(name: bytes, size: int, checksum: int) -> bytes:
    head = _HEAD.pack(_MAGIC, _VERSION, len(name), size, checksum, 0)[: -_HEAD_CRC.size]
    return head + _HEAD_CRC.pack(zlib.crc32(name, zlib.crc32(head)))


def _read(stream: Any, name: bytes, limit: int) -> memoryview | None:
    """Returns the payload of an open entry, or None if it is no regular file. Raises ValueError with what is wrong."""
    facts = os.fstat(stream.fileno())
    if not stat.S_ISREG(facts.st_mode):
        return None
    before = _HEAD.size + len(name)
    data = stream.read(before)
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise ValueError("damaged")
    _, version, name_bytes, size, checksum, _ = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise ValueError("from another version of kvedge")
    # checks the sizes before it allocates memory
    if data != _head(name, size, checksum) + name or name_bytes != len(name) or facts.st_size != before + size:
        raise ValueError("damaged")
    if facts.st_size > limit:
        raise ValueError("larger than the limit of the folder")
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
        if os.name != "nt" or not file.exists():  # Windows does not replace a file in use; that file is the same entry
            raise


def _is_left(process: int, written: float) -> bool:
    return time.time() - written > _LEFT_S or not is_running(process)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
