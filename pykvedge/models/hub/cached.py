"""Lists models in the cache, finds them by name without a network, and removes them.

Removing a model removes its names, and the files without another name in the repository.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pykvedge.errors import HubError, ModelError, UnknownNameError, unknown
from pykvedge.models.gguf import read_header
from pykvedge.models.hub.folders import Folder, Pair, below, folders
from pykvedge.models.hub.names import HubRequest, Name, find_mmproj, find_parts, is_model, quants, split_of

_PARTIAL = (".incomplete", ".downloadInProgress")  # incomplete downloads of huggingface_hub and of llama.cpp


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache. bytes: of all its parts. mmproj: the path of its image encoder in the repository."""

    repo: str
    quant: str  # "": the file name has none
    file: str  # path of the first part in the repository
    commit: str
    bytes: int
    mmproj: str | None
    mmproj_bytes: int

    @property
    def name(self) -> str:
        """The name that `-hf` takes."""
        return f"{self.repo}:{self.quant}" if self.quant else self.repo

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


def cached_models() -> tuple[list[CachedModel], list[str]]:
    """Returns the models in the cache, each once, and a line of text for each broken model."""
    models: dict[tuple[str, str], CachedModel] = {}
    problems: dict[str, None] = {}
    for folder in folders():
        for commit in folder.commits():
            files = folder.files(commit)
            for path in filter(is_model, files):
                if split_of(path).index > 1 or (folder.repo, path) in models:
                    continue
                try:
                    models[folder.repo, path] = _model(folder, commit, files, path)
                except HubError as error:
                    problems[str(error)] = None
    return list(models.values()), list(problems)


def _model(folder: Folder, commit: str, files: dict[str, Path], path: str) -> CachedModel:
    mmproj = find_mmproj(files, path)
    n_bytes = sum(folder.checked(files[part]).stat().st_size for part in find_parts(files, path))
    of_mmproj = folder.checked(files[mmproj]).stat().st_size if mmproj else 0
    return CachedModel(folder.repo, split_of(path).quant, path, commit, n_bytes, mmproj, of_mmproj)


def damage(model: CachedModel) -> str:
    """Returns what is wrong with the files of a model, by their headers, or ""."""
    folder = Folder.of(model.repo)
    try:
        for file in filter(None, (model.file, model.mmproj)):
            read_header(folder.place(model.commit, file))
    except ModelError as error:
        return str(error)
    return ""


def unfinished() -> dict[str, int]:
    """Returns repository -> bytes of incomplete downloads."""
    found: Counter[str] = Counter()
    for folder in folders():
        for path in below(folder.path / "blobs"):
            if path.name.endswith(_PARTIAL):
                found[folder.repo] += path.lstat().st_size
    return dict(found)


def find_cached(request: HubRequest) -> Pair | None:
    """Returns the cached files of a model: from main's commit, else another commit. Returns None if a file is missing.

    Raises HubError for files that lead out of the cache, UnknownNameError if the cache has other models of it only.
    """
    folder = Folder.of(request.name.repo)
    missing: UnknownNameError | None = None
    for files in filter(None, map(folder.files, folder.commits())):
        try:
            choice = request.choice(list(files))
        except HubError:  # an encoder alone, or a missing part
            continue
        except UnknownNameError as error:
            missing = missing or error
            continue
        return folder.pair(choice, files)
    if missing is not None:
        raise missing
    return None


@dataclass(frozen=True)
class Removal:
    """The removal of a model. bytes: the freed disk space."""

    name: Name
    folder: Folder
    files: list[str]  # paths in the repository, each once
    bytes: int
    places: list[Path] = field(repr=False)  # links and files in the folder; empty: the whole folder is removed

    @property
    def whole(self) -> bool:
        """Whether the whole folder of the repository is removed."""
        return not self.name.quant

    def run(self) -> None:
        """Removes the files. Raises HubError if that fails; already removed files stay removed."""
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
            with suppress(OSError):  # the folder holds other names
                Path(folder).rmdir()


def remove(name: str) -> Removal:
    """Returns the removal of user/repo, or of one quantisation. Nothing is removed before the removal's `run`.

    The image encoder is removed with the last model that would use it. Raises UsageError for an invalid name, HubError
    for a repository that is not in the cache, UnknownNameError for a missing quantisation.
    """
    wanted = Name.of(name)
    folder = Folder.of(wanted.repo)
    if not folder.path.is_dir():
        raise HubError(f"{wanted.repo} is not in the cache; `kvedge list` shows the models in the cache")
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
    """Returns the models of a quantisation and the image encoders that only they use: path -> path in the cache."""
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
