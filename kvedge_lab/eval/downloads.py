"""Downloads the data of recipes from the addresses that its owners publish, and compares it with its SHA-256.

manifest.json has for each recipe: `files`, each with `url`, `path` and, if known, `sha256` (`unpack`: the file is an
archive to unpack); `data` and `images`, the paths that the recipe reads; `model`, a repository of a hub; or `page`, if
the data must be fetched by hand. If the manifest has no checksum, the checksum of the first download is stored and
compared with later downloads (trust on first use).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykvedge.errors import DatasetError, HubError, UnreachableError, UsageError, one_line
from pykvedge.models.hub.fetching import checksum
from pykvedge.system.memory import readable

MANIFEST = Path(__file__).with_name("manifest.json")
_TIMEOUT_S, _HEX = 30.0, 64
_CLIENTS = ("httpx", "httpx2", "httpcore", "huggingface_hub")  # packages whose errors mean a broken connection

Look = Callable[[str, int, int], None]  # called with a file's name, the downloaded bytes, and the size or 0


@dataclass(frozen=True)
class Fetched:
    """The files and the model of a recipe."""

    data: Path
    images: Path | None
    model: str | None  # a name as after -hf


def read_manifest(path: Path, name: str) -> Mapping[str, Any]:
    """Returns the entry of a recipe in a manifest. Raises DatasetError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        entry = found[name]
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
    except KeyError:
        raise DatasetError(f"{path} has no entry for the recipe {name}; give DATA instead of --download") from None
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{path} is not a manifest: {one_line(error):.100}") from None
    if not isinstance(entry, dict):
        raise DatasetError(f"{path}: {name} must be an object")
    if "page" in entry:
        raise DatasetError(
            f"the data of {name} cannot be downloaded automatically: get the data from "
            f"{entry['page']}, and give the file as DATA"
        )
    files = entry.get("files")
    if not isinstance(entry.get("data"), str) or not isinstance(files, list) or not all(map(_is_file, files)):
        raise DatasetError(
            f"{path}: {name} needs 'data' and 'files', and each file needs a 'url' and a relative 'path'"
        )
    return entry


def _is_file(entry: Any) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("url", "path")):
        return False
    path, checksum = Path(entry["path"]), entry.get("sha256", "0" * _HEX)
    known = isinstance(checksum, str) and len(checksum) == _HEX and set(checksum) <= set("0123456789abcdef")
    inside = not path.is_absolute() and ".." not in path.parts
    return known and inside and entry["url"].startswith(("http://", "https://"))


def folder_of(name: str, entry: Mapping[str, Any]) -> Path:
    """Returns the folder of a recipe's data. Recipes with the same `folder` in the manifest share files."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvedge" / "data" / Path(str(entry.get("folder", name))).name


def fetch(entry: Mapping[str, Any], folder: Path, look: Look) -> Fetched:
    """Downloads all files of a recipe into a folder, and unpacks archives. Raises HubError; a later call continues."""
    try:
        for file in entry["files"]:
            path = folder / file["path"]
            if not path.is_file():
                _fetch(file["url"], path, file.get("sha256"), look)
            if file.get("unpack"):
                _unpack(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HubError(f"the disk of {folder} is full; free disk space, and run the same command again") from None
        raise HubError(f"{folder} cannot be written: {error.strerror or error}") from None
    images = entry.get("images")
    return Fetched(folder / entry["data"], folder / images if images else None, entry.get("model"))


def _fetch(url: str, path: Path, expected: str | None, look: Look) -> None:
    part, noted = path.with_name(path.name + ".part"), path.with_name(path.name + ".sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    if expected is None and noted.is_file():
        expected = noted.read_text(encoding="ascii").split()[0]
    while True:
        before = _size(part)
        try:
            _append(url, part, look)
            break
        except UnreachableError:
            if _size(part) == before:  # a try that brings new bytes is worth another try
                raise
    with part.open("rb") as content:
        found = checksum(content, 0, like="0" * _HEX)
    if expected is not None and found != expected:
        part.unlink()
        raise HubError(
            f"{url} was removed, because its checksum is {found[:12]}..., not {expected[:12]}... as in the manifest: "
            f"the data "
            f"has changed or is not authentic; if you trust the data, remove {noted.name} or change the manifest"
        )
    noted.write_text(f"{found}  {path.name}\n", encoding="ascii")
    part.replace(path)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _append(url: str, part: Path, look: Look) -> None:
    """Appends the missing rest of a file. Raises UnreachableError for a broken connection, HubError for a refusal."""
    try:
        from huggingface_hub.utils import http_stream_backoff
    except ImportError:
        raise UsageError("--download needs huggingface_hub: pip install 'kvedge[hub]'") from None
    there = _size(part)
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={there}-"} if there else {})}
    try:
        with (
            http_stream_backoff(
                "GET", url, headers=headers, timeout=_TIMEOUT_S, max_retries=2, retry_on_exceptions=()
            ) as response,
            part.open("ab") as out,
        ):
            status = response.status_code
            if status == 416:  # the file is complete
                return
            if status not in (200, 206):
                raise HubError(f"{url} cannot be downloaded (status {status}); the owner may have moved the file")
            if status == 200 and there:  # the server sends the file from the beginning
                out.truncate(0)
                there = 0
            size = there + int(response.headers.get("Content-Length") or 0)
            _check_room(part, size - there)
            for chunk in response.iter_bytes():
                out.write(chunk)
                there += len(chunk)
                look(part.stem, there, size)
            out.flush()
            os.fsync(out.fileno())
    except Exception as error:
        client = type(error).__module__.partition(".")[0] in _CLIENTS
        if not client and not isinstance(error, ConnectionError):
            raise
        raise UnreachableError(f"{url} cannot be reached ({one_line(error) or type(error).__name__:.100})") from None


def _check_room(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise HubError(
            f"{part.stem} needs {readable(needed)} in {part.parent}, but only {readable(free)} are free; "
            f"free disk space"
        )


def _unpack(path: Path) -> None:
    """Unpacks an archive beside itself, once. Its members cannot leave the folder."""
    done = path.with_name(path.name + ".unpacked")
    if done.exists():
        return
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(path.parent)
        elif not hasattr(tarfile, "data_filter"):
            raise HubError(f"{path} can be unpacked from Python 3.10.12 on; or unpack it there, and make {done.name}")
        else:
            with tarfile.open(path) as archive:
                archive.extractall(path.parent, filter="data")
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise HubError(f"{path} cannot be unpacked ({one_line(error):.80}); remove the file") from None
    done.touch()
