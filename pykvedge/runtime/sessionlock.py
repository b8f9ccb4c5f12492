"""Locks a session file for one program, from the start of a conversation to its end.

Every program writes the whole conversation, so two programs would lose each other's turns. Every answer replaces the
session file, so the lock is on a small file beside it. The system releases the lock of a killed program. The holder of
the lock also removes half-written files of killed programs.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from pykvedge.errors import SessionFileError
from pykvedge.system.guard import Closing
from pykvedge.system.memory import is_running

_NUMBER_BYTES = 32  # most bytes of the process number in the lock file
_LOCK_AT = 2**31 - 2  # on Windows a locked byte is not readable, so the lock is on a byte behind the file's end
IN_USE = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # what try_lock raises if another program holds the lock

if sys.platform == "win32":
    import msvcrt

    def try_lock(handle: int) -> None:
        """Locks an open file until it is closed. Raises OSError if another program holds the lock."""
        os.lseek(handle, _LOCK_AT, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def try_lock(handle: int) -> None:
        """Locks an open file until it is closed. Raises OSError if another program holds the lock."""
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class SessionLock(Closing):
    """Holds the lock of a session file, which need not exist yet. Close the lock, or use a with statement."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises SessionFileError if another program holds the lock, or if the file is read-only."""
        self.path = Path(path)
        real = Path(os.path.realpath(path))  # all names of a file, and links to it, share one lock
        _check_writable(self.path, real)
        self._file = real.with_name(f"{real.name}.lock")
        self._handle: int | None = self._take()
        remove_leftovers(real)

    def _take(self) -> int:
        while True:
            try:
                handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise SessionFileError(f"{self.path} cannot be written: {error.strerror or error}") from None
            try:
                try_lock(handle)
            except OSError as error:
                if error.errno in IN_USE:
                    holder = _holder(handle)
                    os.close(handle)
                    raise SessionFileError(
                        f"{self.path} is in use by another kvedge{holder}; wait until the other kvedge ends, "
                        "or use another session file"
                    ) from None
                return handle  # the file system has no locks: continue without a lock
            if _is_still(handle, self._file):
                _write_holder(handle)
                return handle
            os.close(handle)  # the previous holder removed the lock file after it was opened here

    def close(self) -> None:
        """Releases the lock. A second call does nothing."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        if sys.platform == "win32":  # Windows cannot remove an open file
            os.close(handle)
        with suppress(OSError):
            self._file.unlink()
        if sys.platform != "win32":
            os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Removes half-written files beside a session file that libkvedge began in processes that have ended."""
    mine = re.compile(re.escape(path.name) + r"\.(\d{1,10})-\d{1,2}\.part")
    with suppress(OSError):
        for entry in list(os.scandir(path.parent)):
            found = mine.fullmatch(entry.name)
            if found and not is_running(int(found[1])):
                with suppress(OSError):
                    Path(entry.path).unlink()


def _check_writable(path: Path, real: Path) -> None:
    """Raises SessionFileError for a read-only file: replacing the file would only need rights on the folder."""
    try:
        mode = real.stat().st_mode
    except OSError:
        return  # the file does not exist yet, or opening it will report the error
    if not mode & 0o222 or not os.access(real, os.W_OK):
        raise SessionFileError(f"{path} is read-only; make {path} writable, or continue with a copy of the file")


def _is_still(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except OSError:
        return False


def _write_holder(handle: int) -> None:
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, str(os.getpid()).encode())


def _holder(handle: int) -> str:
    with suppress(OSError):
        os.lseek(handle, 0, os.SEEK_SET)
        number = os.read(handle, _NUMBER_BYTES)
        if number.isdigit():
            return f" (process {number.decode()})"
    return ""
