"""What is given as a file is one: opening a pipe waits for somebody who writes, and a device has no end."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def require_file(path: str | bytes | os.PathLike[str]) -> None:
    """Raises OSError, whose strerror says why, where there is no regular file. Links are followed."""
    kind = stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116 - bytes are a path, too
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something')}, not a file", os.fsdecode(path))
