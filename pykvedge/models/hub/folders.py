"""The cache of a hub's repositories on this machine, in the layout that huggingface_hub and llama.cpp share.

A repository is a folder models--USER--REPO. Its files are blobs/CHECKSUM. snapshots/COMMIT/PATH are links to these
files, by their names in the repository. refs/main holds the commit that main was when the hub was asked last.
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

# the variables that llama.cpp looks at, in its order, and the folder below each
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
    """Returns the folder of the cache, which need not exist."""
    for variable, below in _PLACES:
        if value := os.environ.get(variable):
            return Path(value).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


class Pair(NamedTuple):
    """The files of a model: Session(*pair) or load(*pair) takes them."""

    model: Path
    mmproj: Path | None


@dataclass(frozen=True)
class Folder:
    """A repository has this folder in the cache."""

    repo: str
    path: Path

    @classmethod
    def of(cls, repo: str) -> Folder:
        return cls(repo, cache_dir() / f"models--{repo.replace('/', '--')}")

    def blob(self, checksum: str) -> Path:
        return self.path / "blobs" / checksum

    def partial(self, checksum: str) -> Path:
        """Returns the place of a download that is not complete; the next download goes on with it."""
        return self.path / "blobs" / f"{checksum}.incomplete"

    def lock(self, checksum: str) -> Path:
        """Returns the lock that huggingface_hub, too, takes while it fetches the file."""
        return self.path.parent / ".locks" / self.path.name / f"{checksum}.lock"

    def place(self, commit: str, file: str) -> Path:
        """Returns the link that gives a file of the repository its name."""
        return self.path / "snapshots" / commit / file

    def holds(self, path: Path) -> bool:
        """Tells whether a path ends in this folder or elsewhere in the cache, whatever links it goes through."""
        with suppress(OSError, RuntimeError):  # a loop of links
            end = path.resolve()
            return any(end.is_relative_to(root.resolve()) for root in (self.path, self.path.parent))
        return False

    def commits(self) -> list[str]:
        """Lists the commits that have a folder: main's, then the others, the last changed first."""
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
        """Path in the repository -> place in the cache, for each GGUF file of a commit that is there."""
        top = self.path / "snapshots" / commit
        found = {place.relative_to(top).as_posix(): place for place in below(top) if place.suffix == ".gguf"}
        return {path: found[path] for path in sorted(found) if is_safe(path)}

    def checked(self, place: Path) -> Path:
        """Returns the place of a file. Raises HubError if it leads out of the cache, or to nothing."""
        if not self.holds(place):
            raise HubError(f"{place} leads out of the cache; remove it, and fetch it again")
        if not place.is_file():
            raise HubError(f"{place} is not complete; fetch it again")
        return place

    def pair(self, choice: Choice, places: Mapping[str, Path]) -> Pair:
        """Returns the places of a choice's files. Raises HubError if one leads out of the cache, or to nothing."""
        checked = {path: self.checked(places[path]) for path in choice.files}
        return Pair(checked[choice.model], checked.get(choice.mmproj or ""))

    def link(self, commit: str, file: str, checksum: str) -> Path:
        """Gives a fetched file its name, as a link where the system has links. Raises HubError where it cannot."""
        place, blob = self.place(commit, file), self.blob(checksum)
        if not self.holds(place.parent):
            raise HubError(f"{place.parent} leads out of the cache; remove it")
        if place.exists() and not (blob.is_file() and blob.stat().st_size != place.stat().st_size):
            return place
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)  # a link to a file that was removed, or a copy that is not whole
            try:
                place.symlink_to(os.path.relpath(blob, place.parent))
            except OSError:  # Windows links with a privilege only; both libraries then move the file
                shutil.move(blob, place)
        except OSError as error:
            raise unwritable(place, error) from None
        return place

    def note_main(self, commit: str) -> None:
        """Writes down which commit main is. Raises HubError where it cannot."""
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
    """Lists the files below a folder. Linked folders are not entered."""
    return [Path(folder, name) for folder, _, names in os.walk(top) for name in names]


def unwritable(path: Path, error: OSError) -> HubError:
    """Makes the error for a place in the cache that cannot be written."""
    return HubError(f"{path} cannot be written: {error.strerror or error}; HF_HUB_CACHE names another folder")


def folders() -> Iterator[Folder]:
    """Goes through the repositories in the cache, by their names."""
    with suppress(OSError):
        for path in sorted(cache_dir().iterdir()):
            repo = path.name.removeprefix("models--").replace("--", "/")
            if path.name.startswith("models--") and is_repo(repo) and path.is_dir():
                yield Folder(repo, path)
