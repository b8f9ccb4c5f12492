"""Downloads of a hub's files into the cache go on where an earlier one ended, and are compared with their checksums.

A file gets the name that other programs look for when it is complete, compared, and on the disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from pykvedge.errors import HubError, UnreachableError
from pykvedge.models.hub.folders import Folder, unwritable
from pykvedge.models.hub.remote import Hub, RemoteFile
from pykvedge.system.memory import readable

_TRIES = 5  # in a row that bring no byte
_PAUSE_S = 0.5  # before the second; then twice as long each time
_BLOCK = 1 << 20
_SHA1_HEX = 40

Look = Callable[[int], None]  # takes the number of bytes that are there; an exception from it ends the download


def is_there(folder: Folder, commit: str, file: RemoteFile) -> bool:
    """Tells whether a file is in the cache, whole, under its name at this commit or any other."""
    places = (folder.place(commit, file.path), folder.blob(file.checksum))
    return any(_size(path) == file.size and path.is_file() and folder.holds(path) for path in places)


def check_room(folder: Folder, files: Sequence[RemoteFile], what: str) -> None:
    """Raises HubError if the disk has no room for the missing bytes of the files. what: names them in the message."""
    needed = sum(max(file.size - _size(folder.partial(file.checksum)), 0) for file in files)
    place = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise HubError(
            f"{what} needs {readable(needed)} more in {folder.path.parent}, where {readable(free)} are free; make "
            "room, or let HF_HUB_CACHE name a folder on another disk"
        )


def fetch(hub: Hub, folder: Folder, commit: str, file: RemoteFile, look: Look) -> None:
    """Brings a file into the folder's blobs. Raises HubError; the bytes that have come stay for the next try."""
    try:
        with hub.lock(folder.lock(file.checksum)):
            if is_there(folder, commit, file):
                return
            part = folder.partial(file.checksum)
            if not folder.holds(part):
                raise HubError(f"{part} leads out of the cache; remove it")
            part.parent.mkdir(parents=True, exist_ok=True)
            if _size(part) > file.size:
                part.unlink()
            _complete(hub, folder, commit, file, look)
            _compare(part, file, f"{folder.repo}/{file.path}")
            part.replace(folder.blob(file.checksum))
    except OSError as error:
        raise unwritable(folder.blob(file.checksum), error) from None


def _complete(hub: Hub, folder: Folder, commit: str, file: RemoteFile, look: Look) -> None:
    part, idle = folder.partial(file.checksum), 0
    while True:
        with part.open("ab") as out:
            begun = out.tell()
            try:
                if begun < file.size:
                    hub.append(folder.repo, commit, file, out, look)
            except UnreachableError:
                idle = idle + 1 if out.tell() <= begun else 1
                if idle >= _TRIES:
                    raise
            out.flush()
            os.fsync(out.fileno())
            if out.tell() >= file.size:
                return
        time.sleep(_PAUSE_S * 2 ** (idle - 1))


def _compare(part: Path, file: RemoteFile, name: str) -> None:
    """Removes a file whose content is not what the hub says, and raises HubError."""
    with part.open("rb") as content:
        found = checksum(content, file.size, like=file.checksum)
    if found != file.checksum:
        part.unlink()
        raise HubError(
            f"{name} came damaged: its checksum is {found[:12]}..., the hub says {file.checksum[:12]}...; it was "
            "removed, fetch it again"
        )


def checksum(content: BinaryIO, size: int, like: str) -> str:
    """Computes a file's checksum as a hub names it: sha256, or where `like` is as short as a sha1, git's of a blob."""
    digest = hashlib.sha256()
    if len(like) == _SHA1_HEX:
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    while block := content.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
