"""Models in the cache are listed, and found by their names without a network."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pykvedge.errors import HubError, UnknownNameError
from pykvedge.models.hub.folders import Folder, Pair, below, folders
from pykvedge.models.hub.names import Wanted, find_mmproj, find_parts, is_model, split_of

PARTIAL = (".incomplete", ".downloadInProgress")  # begun downloads of huggingface_hub and of llama.cpp


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache. bytes: of all its parts. mmproj: the path of its image encoder in the repository."""

    repo: str
    quant: str  # empty: its name says none
    file: str  # path in the repository, of the first part
    commit: str
    bytes: int
    mmproj: str | None
    mmproj_bytes: int

    @property
    def name(self) -> str:
        """Returns the name that `-hf` takes."""
        return f"{self.repo}:{self.quant}" if self.quant else self.repo

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


def cached_models() -> tuple[list[CachedModel], list[str]]:
    """Lists the models in the cache, each once; and for each broken one a line that says what is wrong."""
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


def unfinished() -> dict[str, int]:
    """Repository -> bytes of downloads that were begun and not finished."""
    found: Counter[str] = Counter()
    for folder in folders():
        for path in below(folder.path / "blobs"):
            if path.name.endswith(PARTIAL):
                found[folder.repo] += path.lstat().st_size
    return dict(found)


def find_cached(wanted: Wanted) -> Pair | None:
    """Finds the files of a model in the cache: in main's commit, else in another. Returns None if one is missing.

    Raises HubError for files that lead out of the cache, UnknownNameError if the cache has only other models of the
    repository.
    """
    folder = Folder.of(wanted.name.repo)
    missing: UnknownNameError | None = None
    for files in filter(None, map(folder.files, folder.commits())):
        try:
            choice = wanted.choice(list(files))
        except HubError:  # an encoder alone, or a part too few
            continue
        except UnknownNameError as error:
            missing = missing or error
            continue
        return folder.pair(choice, files)
    if missing is not None:
        raise missing
    return None
