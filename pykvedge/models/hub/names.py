"""Chooses the files of user/repo[:quant] by their names, as llama.cpp's common/download.cpp does.

One rule is kvedge's own: a quantisation that is a whole word ranks before the end of a word, so F16 is not BF16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pykvedge.errors import HubError, UsageError, one_line, unknown

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
NO_MMPROJ = "none"
_REPO = re.compile(r"(?!.{257})\w+(?:[.-]\w+)*/\w+(?:[.-]\w+)*", re.ASCII)
_QUANT = re.compile(r"[\w.-]{1,64}", re.ASCII)
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_TAG = re.compile(r"[-.]([A-Z0-9_]+)$", re.IGNORECASE)
_SIDECARS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # files beside a model
_LONGEST_PATH = 512


@dataclass(frozen=True)
class Name:
    """A repository, and the wanted quantisation; "" leaves the choice to the rules."""

    repo: str
    quant: str = ""

    @classmethod
    def of(cls, text: str) -> Name:
        """Reads user/repo[:quant]. Raises UsageError for any other text."""
        if not isinstance(text, str):
            raise UsageError(f"the name of a model must be text such as user/repo:Q4_K_M, not {text!r:.40}")
        repo, colon, quant = text.partition(":")
        if not is_repo(repo) or (colon and not _QUANT.fullmatch(quant)):
            raise UsageError(f"'{one_line(text):.80}' is not the name of a model; write user/repo, or user/repo:Q4_K_M")
        return cls(repo, quant)

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def is_repo(text: str) -> bool:
    """Returns whether a text is user/repo, by llama.cpp's rule: in the cache, two dashes replace the slash."""
    return _REPO.fullmatch(text) is not None


@dataclass(frozen=True)
class Split:
    """A split name of a GGUF file: the prefix shared by a model's parts, the quantisation, the part's number."""

    prefix: str
    quant: str  # upper case; "": the name has none
    index: int = 1
    count: int = 1

    @property
    def bits(self) -> int:
        """The first number in the quantisation: 4 of Q4_K_M, 16 of BF16; 0 if there is no number."""
        found = re.search(r"\d{1,6}", self.quant)
        return int(found[0]) if found else 0


def split_of(path: str) -> Split:
    """Splits the name of a file. All fields are empty if the file is no GGUF file."""
    if not path.endswith(".gguf"):
        return Split("", "", 0)
    prefix, index, count = path.removesuffix(".gguf"), 1, 1
    if found := _SPLIT.fullmatch(prefix):
        prefix, index, count = found[1], int(found[2]), int(found[3])
    tag = _TAG.search(prefix)
    return Split(prefix, tag[1].upper() if tag else "", index, count)


def is_safe(path: str) -> bool:
    """Returns whether a path stays inside of its folder on every system and is printable."""
    parts = path.split("/")
    return (
        len(path) <= _LONGEST_PATH
        and path.isprintable()
        and not any(sign in path for sign in "\\:")
        and not any(part in ("", ".", "..") for part in parts)
    )


def is_model(path: str) -> bool:
    """Returns whether a file is a language model, or a part of one, by its name."""
    name = path.rpartition("/")[2]
    return name.endswith(".gguf") and not any(word in name for word in _SIDECARS)


def quants(paths: Iterable[str]) -> list[str]:
    """Returns the quantisations of the models; a model without one is listed by its path."""
    found = [split_of(path).quant or path for path in paths if is_model(path)]
    return list(dict.fromkeys(found))


def find_model(paths: Sequence[str], quant: str) -> str | None:
    """Returns the model's path, or its first part. Without `quant`: Q4_K_M, else Q8_0, else the first model."""
    first = [path for path in paths if is_model(path) and split_of(path).index <= 1]
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        for before in (r"(?<![A-Za-z0-9])", "") if quant else ("",):
            pattern = re.compile(before + re.escape(wanted) + "[.-]", re.IGNORECASE)
            found = next(filter(pattern.search, first), None)
            if found is not None:
                return found
    return None if quant else next(iter(first), None)


def find_parts(paths: Iterable[str], model: str) -> list[str]:
    """Returns the files of a model in their order. Raises HubError if a part is missing."""
    whole = split_of(model)
    if whole.count <= 1:
        return [model]
    parts = {
        split_of(p).index: p for p in paths if (split_of(p).prefix, split_of(p).count) == (whole.prefix, whole.count)
    }
    missing = [index for index in range(1, whole.count + 1) if index not in parts]
    if missing:
        raise HubError(f"part {missing[0]} of {whole.count} of {model} is missing; choose another quantisation")
    return [parts[index] for index in range(1, whole.count + 1)]


def find_mmproj(paths: Iterable[str], model: str) -> str | None:
    """Returns the image encoder from the model's folder or the nearest one above, nearest in bits; else None."""
    folder, bits = model.split("/")[:-1], split_of(model).bits
    best: tuple[tuple[int, int], str] | None = None
    for path in paths:
        beside = path.split("/")[:-1]
        if not path.endswith(".gguf") or "mmproj" not in path or folder[: len(beside)] != beside:
            continue
        rank = (-len(beside), abs(split_of(path).bits - bits))
        if best is None or rank < best[0]:
            best = rank, path
    return best[1] if best else None


@dataclass(frozen=True)
class Choice:
    """The chosen files of a repository."""

    model: str  # the first of its parts
    parts: tuple[str, ...]
    mmproj: str | None

    @property
    def files(self) -> tuple[str, ...]:
        """All files, with the small encoder first."""
        return (*filter(None, [self.mmproj]), *self.parts)


@dataclass(frozen=True)
class HubRequest:
    """The user's wish. file, mmproj: paths that replace the choice of the rules; mmproj "none": no encoder."""

    name: Name
    file: str = ""
    mmproj: str = ""

    def choice(self, paths: Sequence[str]) -> Choice:
        """Chooses among the files of the repository.

        Raises UnknownNameError for a missing quantisation or file, HubError if the repository has no model.
        """
        hostile = next((path for path in paths if path.endswith(".gguf") and not is_safe(path)), None)
        if hostile is not None:
            raise HubError(
                f"{self.name.repo} is refused, because its file name {hostile!r:.80} points outside the "
                f"repository; use another repository"
            )
        models = [path for path in paths if is_model(path)]
        if not models:
            raise HubError(f"{self.name.repo} has no GGUF model; look for a repository whose name ends in GGUF")
        if self.file:
            model: str | None = self._named("file", self.file, models)
        else:
            model = find_model(paths, self.name.quant)
        if model is None:
            has = quants(paths)
            raise unknown(f"quantisation of {self.name.repo}", self.name.quant, has, [f"available: {', '.join(has)}"])
        mmproj = find_mmproj(paths, model)
        if self.mmproj:
            encoders = [path for path in paths if path.endswith(".gguf") and "mmproj" in path]
            mmproj = None if self.mmproj == NO_MMPROJ else self._named("mmproj", self.mmproj, encoders)
        return Choice(model, tuple(find_parts(models, model)), mmproj)

    def _named(self, kind: str, path: str, paths: Sequence[str]) -> str:
        if path not in paths:
            raise unknown(f"{kind} in {self.name.repo}", one_line(path), paths)
        return path
