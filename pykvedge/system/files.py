"""Checks that a path is a regular file: a pipe waits for a writer, and a device has no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# kvedge's model and profiles; importlib.resources finds no folder in an editable installation
DATA = Path(__file__).parent.parent / "data"
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def require_file(path: str | bytes | os.PathLike[str]) -> None:
    """Raises OSError, with the reason in strerror, unless the path is a regular file. Links are followed."""
    kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 - bytes are valid paths too
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"the path is {_KINDS.get(kind, 'something')}, not a file", os.fsdecode(path))


def is_there(path: Path) -> bool:
    """Returns whether a path exists. Returns False if its folder is closed to this user."""
    try:
        return path.exists()
    except PermissionError:
        return False


def write_whole(path: Path, text: str) -> None:
    """Writes a text file to the disk in place of an older file. Missing folders are created.

    A link stays a link. A pipe or a device is written to. Raises OSError.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
