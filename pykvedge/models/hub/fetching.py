"""Downloads files of a hub into the cache. A download continues where the last one ended; its checksum is compared.

A file gets the name that other programs look for after it is complete, compared, and on the disk.
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

_TRIES = 5  # tries in a row without a new byte
_PAUSE_S = 0.5  # pause before the second try; it doubles each time
_BLOCK = 1 << 20
_SHA1_HEX = 40

Look = Callable[[int], None]  # receives the number of downloaded bytes; an exception from it ends the download


def is_there(folder: Folder, commit: str, file: RemoteFile) -> bool:
    """Returns whether the cache holds the whole file, under its name at this commit or any other."""
    places = (folder.place(commit, file.path), folder.blob(file.checksum))
    return any(_size(path) == file.size and path.is_file() and folder.holds(path) for path in places)


def check_room(folder: Folder, files: Sequence[RemoteFile], what: str) -> None:
    """Raises HubError if the disk has no room for the missing bytes of the files. what: a name for messages."""
    needed = sum(max(file.size - _size(folder.partial(file.checksum)), 0) for file in files)
    place = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise HubError(
            f"{what} needs {readable(needed)} in {folder.path.parent}, but only {readable(free)} are free; free disk "
            f"space, or set HF_HUB_CACHE to a folder on another disk"
        )


def fetch(hub: Hub, folder: Folder, commit: str, file: RemoteFile, look: Look) -> None:
    """Downloads a file into the folder's blobs. Raises HubError; downloaded bytes stay for the next try."""
    try:
        with hub.lock(folder.lock(file.checksum)):
            if is_there(folder, commit, file):
                return
            part = folder.partial(file.checksum)
            if not folder.holds(part):
                raise HubError(f"{part} is a link to a place outside the cache; remove this link")
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
    """Removes a file whose checksum differs from the hub's, and raises HubError."""
    with part.open("rb") as content:
        found = checksum(content, file.size, like=file.checksum)
    if found != file.checksum:
        part.unlink()
        raise HubError(
            f"the download of {name} is damaged and was removed: its checksum is {found[:12]}..., not "
            f"{file.checksum[:12]}...; download the file again"
        )


def checksum(content: BinaryIO, size: int, like: str) -> str:
    """Returns a file's checksum as the hub writes it: sha256, or git's sha1 of a blob if `like` is a sha1."""
    digest = hashlib.sha256()
    if len(like) == _SHA1_HEX:
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    while block := content.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
