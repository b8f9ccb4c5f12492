"""Removing a model removes its names in the cache, and the files that no other name in the repository leads to."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pykvedge.errors import HubError, unknown
from pykvedge.models.hub.folders import Folder, below
from pykvedge.models.hub.names import Name, find_mmproj, is_model, quants, split_of


@dataclass(frozen=True)
class Removal:
    """This would be removed. bytes: the room that the disk gets back."""

    name: Name
    folder: Folder
    files: list[str]  # paths in the repository, each once
    bytes: int
    places: list[Path] = field(repr=False)  # links and files in the folder; empty: the whole folder goes

    @property
    def whole(self) -> bool:
        """Tells whether the repository's folder goes, with all that is in it."""
        return not self.name.quant

    def run(self) -> None:
        """Removes it. Raises HubError where that fails; what is gone then stays gone."""
        try:
            if self.whole:
                shutil.rmtree(self.folder.path)
                shutil.rmtree(self.folder.lock("").parent, ignore_errors=True)
            for path in self.places:
                path.unlink(missing_ok=True)
        except OSError as error:
            place = error.filename or self.folder.path
            raise HubError(f"{place} cannot be removed: {error.strerror or error}") from None
        for folder, *_ in os.walk(self.folder.path / "snapshots", topdown=False):
            with suppress(OSError):  # it holds other names
                Path(folder).rmdir()


def remove(name: str) -> Removal:
    """Says what goes with user/repo, or with one quantisation of it; its method `run` removes that.

    The image encoder goes with the last model that it would be chosen for. Raises UsageError for a name that is none,
    HubError for a repository that is not in the cache, UnknownNameError for a quantisation that is not.
    """
    wanted = Name.of(name)
    folder = Folder.of(wanted.repo)
    if not folder.path.is_dir():
        raise HubError(f"{wanted.repo} is not in the cache; `kvedge models` lists what is")
    there = [folder.files(commit) for commit in folder.commits()]
    paths = {path for files in there for path in files}
    if not wanted.quant:
        return Removal(wanted, folder, sorted(paths), _bytes(below(folder.path)), [])
    names = {place: path for files in there for path, place in _chosen(files, wanted.quant).items()}
    if not names:
        raise unknown(f"quantisation of {wanted.repo} in the cache", wanted.quant, quants(sorted(paths)))
    links = [place for place in below(folder.path / "snapshots") if place.is_symlink()]
    stay = {_end(link) for link in links if link not in names}
    blobs = {_end(link) for link in links if link in names} - stay
    inside = folder.path / "blobs"
    going = [*names, *(blob for blob in blobs if blob.parent == inside and os.path.lexists(blob))]
    return Removal(wanted, folder, sorted(set(names.values())), _bytes(going), going)


def _chosen(files: dict[str, Path], quant: str) -> dict[str, Path]:
    """Chooses the models of a quantisation, and the image encoders that only they would use."""
    models, named = [path for path in files if is_model(path)], (f"-{quant.upper()}", f".{quant.upper()}")
    going = [path for path in models if split_of(path).prefix.upper().endswith(named)]
    staying = [path for path in models if path not in going]
    used, needed = ({find_mmproj(files, path) for path in group} for group in (going, staying))
    if going and not staying:
        used |= {path for path in files if not is_model(path)}
    return {path: files[path] for path in {*going, *used} - needed if path is not None}


def _end(link: Path) -> Path:
    """Follows a link by one step."""
    return Path(os.path.normpath(link.parent / link.readlink()))


def _bytes(paths: list[Path]) -> int:
    return sum(path.lstat().st_size for path in paths if not path.is_symlink())
