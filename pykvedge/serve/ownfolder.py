"""The folder for conversations that wait where none was named: one of the server's own, gone when it ends.

Its server holds a lock on a file in it, which the system takes away from a server that was killed; the next one
removes what such a server left.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pykvedge.errors import KvedgeError
from pykvedge.runtime.sessionlock import try_lock

_PREFIX = "kvedge-park-"
_LOCK = "lock"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Makes a folder that only its owner reads, and removes it in the end. Raises KvedgeError if none can be made."""
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))
            handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise KvedgeError(
                f"no folder can be made for conversations that wait: {error.strerror or error}; name one, --park DIR"
            ) from None
        stack.callback(os.close, handle)
        with suppress(OSError):  # a file system without locks: then others cannot tell, and leave it alone
            try_lock(handle)
        _remove_left(folder.parent, folder)
        yield folder


def _remove_left(root: Path, own: Path) -> None:
    with suppress(OSError):
        for entry in os.scandir(root):
            if entry.name.startswith(_PREFIX) and entry.name != own.name and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Tells whether a folder is this user's and nobody holds it any more. One without a lock may be just being made."""
    try:
        facts = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(facts.st_mode) or (hasattr(os, "getuid") and facts.st_uid != os.getuid()):
            return False
        handle = os.open(Path(entry.path) / _LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        try_lock(handle)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
