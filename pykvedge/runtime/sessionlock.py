"""A session file is for one program at a time: who goes on with a conversation holds a lock until the end.

Without it the turns of one of two programs would be lost, as each writes the whole conversation. The lock lies on a
small file beside the session file, which itself is replaced with every answer; the system takes the lock away from a
program that was killed, so that none is ever stale. Its holder also removes what killed programs left half-written.
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

_NUMBER_BYTES = 32  # of the process number in the lock file
_LOCK_AT = 1 << 20  # Windows keeps others from reading what is locked: a byte that is not there

if sys.platform == "win32":
    import msvcrt

    def try_lock(handle: int) -> None:
        """Locks an open file until it is closed. Raises OSError where another holds it."""
        os.lseek(handle, _LOCK_AT, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def try_lock(handle: int) -> None:
        """Locks an open file until it is closed. Raises OSError where another holds it."""
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class SessionLock(Closing):
    """This holds a session file. Use it in a with statement, or close it; the file need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises SessionFileError where another program holds it, or where the file must not be written."""
        self.path = Path(path)
        real = Path(os.path.realpath(path))  # names of a file, and links to it, share a lock
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
                if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                    holder = _holder(handle)
                    os.close(handle)
                    raise SessionFileError(
                        f"{self.path} is in use by another kvedge{holder}; wait until that has ended, "
                        "or use another session file"
                    ) from None
                return handle  # a file system without locks: there is nothing to wait for
            if _is_still(handle, self._file):
                _write_holder(handle)
                return handle
            os.close(handle)  # its holder removed it between the two steps

    def close(self) -> None:
        """Lets others have it. Does nothing the second time."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        if sys.platform == "win32":  # where an open file cannot be removed, nor one that another has opened since
            os.close(handle)
        with suppress(OSError):
            self._file.unlink()
        if sys.platform != "win32":
            os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Removes files that libkvedge began to write beside a session file for processes that have ended since."""
    mine = re.compile(re.escape(path.name) + r"\.(\d{1,10})-\d{1,2}\.part")
    with suppress(OSError):
        for entry in list(os.scandir(path.parent)):
            found = mine.fullmatch(entry.name)
            if found and not is_running(int(found[1])):
                with suppress(OSError):
                    Path(entry.path).unlink()


def _check_writable(path: Path, real: Path) -> None:
    """Refuses a file that is read-only before any work; replacing it would need the folder's consent only."""
    try:
        mode = real.stat().st_mode
    except OSError:
        return  # there is none yet, or opening it says what is wrong
    if not mode & 0o222 or not os.access(real, os.W_OK):
        raise SessionFileError(f"{path} is read-only; allow writing to it, or copy it and go on with the copy")


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
