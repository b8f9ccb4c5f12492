"""Models are removed from the cache: their names, and the files that no other name in the repository leads to."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pykvedge.errors import HubError, unknown
from pykvedge.models.hub.folders import Folder
from pykvedge.models.hub.names import Name, find_mmproj, is_model, quants, split_of


@dataclass(frozen=True)
class Removal:
    """What would be removed. bytes: that the disk gets back."""

    name: Name
    folder: Folder
    whole: bool  # the repository's folder with all that is in it
    files: list[str]  # paths in the repository, each once
    bytes: int
    places: list[Path] = field(repr=False)  # the names
    blobs: list[Path] = field(repr=False)  # the files that only they lead to

    def run(self) -> None:
        """Removes it. Raises HubError where that fails; what is gone then stays gone."""
        try:
            if self.whole:
                shutil.rmtree(self.folder.path)
                shutil.rmtree(self.folder.lock("").parent, ignore_errors=True)
                return
            for path in (*self.places, *self.blobs):
                path.unlink(missing_ok=True)
            for path in self.places:
                _remove_empty(path.parent, self.folder.path / "snapshots")
        except OSError as error:
            place = error.filename or self.folder.path
            raise HubError(f"{place} cannot be removed: {error.strerror or error}") from None


def remove(name: str) -> Removal:
    """Says what goes with user/repo, or with one quantisation of it; its method `run` removes that.

    The image encoder goes with the last model that it would be chosen for. Raises UsageError for a name that is none,
    HubError for a repository that is not in the cache, UnknownNameError for a quantisation that is not.
    """
    wanted = Name.of(name)
    folder = Folder.of(wanted.repo)
    if not folder.path.is_dir():
        raise HubError(f"{wanted.repo} is not in the cache; `kvedge models` lists what is")
    if not wanted.quant:
        files = sorted({path for commit in folder.commits() for path in folder.files(commit)})
        return Removal(wanted, folder, True, files, _bytes_below(folder.path), [], [])
    there = {commit: folder.files(commit) for commit in folder.commits()}
    going = {place for files in there.values() for place in _chosen(files, wanted.quant)}
    if not going:
        raise unknown(f"quantisation of {wanted.repo} in the cache", wanted.quant,
                      quants(path for files in there.values() for path in files))  # fmt: skip
    names = {path for files in there.values() for path, place in files.items() if place in going}
    blobs = _left_alone(folder, going)
    freed = sum(path.lstat().st_size for path in blobs)
    freed += sum(place.lstat().st_size for place in going if not place.is_symlink())
    return Removal(wanted, folder, False, sorted(names), freed, sorted(going), sorted(blobs))


def _chosen(files: dict[str, Path], quant: str) -> list[Path]:
    """Lists the models of a quantisation, and the image encoders that only they would use."""
    models, named = [path for path in files if is_model(path)], (f"-{quant.upper()}", f".{quant.upper()}")
    going = [path for path in models if split_of(path).prefix.upper().endswith(named)]
    staying = [path for path in models if path not in going]
    used, needed = ({find_mmproj(files, path) for path in group} for group in (going, staying))
    if going and not staying:
        used |= {path for path in files if not is_model(path)}
    return [files[path] for path in {*going, *used} - needed if path is not None]


def _left_alone(folder: Folder, going: set[Path]) -> set[Path]:
    """Lists the files that links among `going` lead to, and no other link of any commit."""
    used: set[Path] = set()
    wanted: set[Path] = set()
    for place in _below(folder.path / "snapshots"):
        if place.is_symlink():
            end = Path(os.path.normpath(place.parent / place.readlink()))
            (wanted if place in going else used).add(end)
    inside = folder.path / "blobs"
    return {path for path in wanted - used if path.parent == inside and os.path.lexists(path)}


def _below(top: Path) -> list[Path]:
    return [Path(folder, name) for folder, _, names in os.walk(top) for name in names]


def _bytes_below(top: Path) -> int:
    return sum(path.lstat().st_size for path in _below(top) if not path.is_symlink())


def _remove_empty(folder: Path, top: Path) -> None:
    while folder != top:
        with suppress(OSError):
            folder.rmdir()
        if folder.exists():
            return
        folder = folder.parent
