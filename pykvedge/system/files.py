"""What is given as a file is one: opening a pipe waits for somebody who writes, and a device has no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# the model and the profiles that kvedge brings along; importlib.resources names no folder in an editable installation
DATA = Path(__file__).parent.parent / "data"
_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def require_file(path: str | bytes | os.PathLike[str]) -> None:
    """Raises OSError, whose strerror says why, where there is no regular file. Links are followed."""
    kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 - bytes are a path, too
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something')}, not a file", os.fsdecode(path))


def is_there(path: Path) -> bool:
    """Tells whether something has this path. Nothing has it for who may not enter its folder, as in another's home."""
    try:
        return path.exists()
    except PermissionError:
        return False


def write_whole(path: Path, text: str) -> None:
    """Writes a text file, in place of an older one, and brings it to the disk; folders on the way are made.

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
