"""The cache of a hub's repositories on this machine, in the layout that huggingface_hub and llama.cpp share.

A repository is a folder models--USER--REPO. Its files are blobs/CHECKSUM. snapshots/COMMIT/PATH are links to these
files, with the paths of the repository. refs/main holds the commit of main at the last request to the hub.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pykvedge.errors import HubError
from pykvedge.models.hub.names import Choice, is_repo, is_safe

# variables that name the cache, in llama.cpp's order, and the folder below each
_PLACES = (
    ("LLAMA_CACHE", "."),
    ("HF_HUB_CACHE", "."),
    ("HUGGINGFACE_HUB_CACHE", "."),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
)
is_commit = re.compile(r"[0-9a-fA-F]{40}").fullmatch
is_checksum = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}").fullmatch  # git's sha1 of a small file, or a sha256


def cache_dir() -> Path:
    """Returns the folder of the cache; the folder may not exist."""
    for variable, below in _PLACES:
        if value := os.environ.get(variable):
            return Path(value).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


class Pair(NamedTuple):
    """The files of a model, for Session(*pair) or load(*pair)."""

    model: Path
    mmproj: Path | None


@dataclass(frozen=True)
class Folder:
    """The folder of a repository in the cache."""

    repo: str
    path: Path

    @classmethod
    def of(cls, repo: str) -> Folder:
        return cls(repo, cache_dir() / f"models--{repo.replace('/', '--')}")

    def blob(self, checksum: str) -> Path:
        return self.path / "blobs" / checksum

    def partial(self, checksum: str) -> Path:
        """Returns the path of an incomplete download. The next download continues it."""
        return self.path / "blobs" / f"{checksum}.incomplete"

    def lock(self, checksum: str) -> Path:
        """Returns the lock that kvedge and huggingface_hub take while they fetch the file."""
        return self.path.parent / ".locks" / self.path.name / f"{checksum}.lock"

    def place(self, commit: str, file: str) -> Path:
        """Returns the path of the link with the file's name in the repository."""
        return self.path / "snapshots" / commit / file

    def holds(self, path: Path) -> bool:
        """Returns whether a path ends in this folder or elsewhere in the cache, after all links."""
        with suppress(OSError, RuntimeError):  # a loop of links
            end = path.resolve()
            return any(end.is_relative_to(root.resolve()) for root in (self.path, self.path.parent))
        return False

    def commits(self) -> list[str]:
        """Returns the commits with a folder: main's commit first, then the others, the last changed first."""
        main = self._main()
        found: list[tuple[bool, float, str]] = []
        with suppress(OSError):
            for entry in (self.path / "snapshots").iterdir():
                if is_commit(entry.name) and entry.is_dir() and self.holds(entry):
                    found.append((entry.name == main, entry.stat().st_mtime, entry.name))
        return [name for *_, name in sorted(found, reverse=True)]

    def _main(self) -> str:
        with suppress(OSError, ValueError):
            return (self.path / "refs" / "main").read_text("utf-8").strip()
        return ""

    def files(self, commit: str) -> dict[str, Path]:
        """Returns path in the repository -> path in the cache, for each cached GGUF file of a commit."""
        top = self.path / "snapshots" / commit
        found = {place.relative_to(top).as_posix(): place for place in below(top) if place.suffix == ".gguf"}
        return {path: found[path] for path in sorted(found) if is_safe(path)}

    def checked(self, place: Path) -> Path:
        """Returns the path of a file. Raises HubError if it leads out of the cache, or to nothing."""
        if not self.holds(place):
            raise HubError(
                f"{place} is a link to a place outside the cache; remove this link, and download the file again"
            )
        if not place.is_file():
            raise HubError(f"{place} is incomplete; download the file again")
        return place

    def pair(self, choice: Choice, places: Mapping[str, Path]) -> Pair:
        """Returns the paths of a choice's files. Raises HubError if a path leads out of the cache, or to nothing."""
        checked = {path: self.checked(places[path]) for path in choice.files}
        return Pair(checked[choice.model], checked.get(choice.mmproj or ""))

    def link(self, commit: str, file: str, checksum: str) -> Path:
        """Links a fetched file to its name, or moves it if links are not allowed. Raises HubError if that fails."""
        place, blob = self.place(commit, file), self.blob(checksum)
        if not self.holds(place.parent):
            raise HubError(f"{place.parent} is a link to a place outside the cache; remove this link")
        if place.exists() and not (blob.is_file() and blob.stat().st_size != place.stat().st_size):
            return place
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)  # a link to a removed file, or an incomplete copy
            try:
                place.symlink_to(os.path.relpath(blob, place.parent))
            except OSError:  # Windows links with a privilege only; the file is moved, as in both libraries
                shutil.move(blob, place)
        except OSError as error:
            raise unwritable(place, error) from None
        return place

    def note_main(self, commit: str) -> None:
        """Writes main's commit to refs/main. Raises HubError if that fails."""
        path = self.path / "refs" / "main"
        if self._main() == commit:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{os.getpid()}")
            new.write_text(commit, "ascii")
            new.replace(path)
        except OSError as error:
            raise unwritable(path, error) from None


def below(top: Path) -> list[Path]:
    """Returns the files below a folder. Linked folders are not entered."""
    return [Path(folder, name) for folder, _, names in os.walk(top) for name in names]


def unwritable(path: Path, error: OSError) -> HubError:
    """Returns the error for a path in the cache that cannot be written."""
    return HubError(f"{path} cannot be written: {error.strerror or error}; set HF_HUB_CACHE to another folder")


def folders() -> Iterator[Folder]:
    """Yields the repositories in the cache, sorted by name."""
    with suppress(OSError):
        for path in sorted(cache_dir().iterdir()):
            repo = path.name.removeprefix("models--").replace("--", "/")
            if path.name.startswith("models--") and is_repo(repo) and path.is_dir():
                yield Folder(repo, path)
