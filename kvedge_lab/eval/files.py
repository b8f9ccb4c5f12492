"""Reads files of samples. `where` names the file and the line or sample in messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvedge_lab.eval.tasks import DialogMessage
from pykvedge.errors import DatasetError, unknown
from pykvedge.models.prompt import IMAGE, places
from pykvedge.system.files import require_file


def read_text(path: Path) -> str:
    """Reads a whole file in UTF-8. Raises DatasetError."""
    try:
        require_file(path)
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DatasetError(f"{path} is not UTF-8 text") from None


def parsed(text: str) -> Any:
    """Parses JSON. Raises ValueError, also for a name that an object has twice, of which Python takes the last value,
    and for lone surrogates, which results could not be written with.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    if "\\ud" in text.lower():
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the text has a lone surrogate") from None
    return data


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"the name '{names.most_common(1)[0][0]}' occurs twice in an object")
    return found


def read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return parsed(text)
    except ValueError as error:
        raise DatasetError(f"{path} is not JSON: {error}") from None


def check_columns(data: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raises DatasetError for an unknown column. A misspelt column, for example `image`, would otherwise be missing."""
    for column in data:
        if column not in known:
            raise DatasetError(f"{where}: {unknown('column', column, known)}")


def is_file(path: Path) -> bool:
    """Returns whether a file exists. A name that the system refuses does not exist."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Returns whether a folder exists. A name that the system refuses does not exist."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def image_file(folder: Path, name: Any, where: str) -> Path:
    """Returns the path of an existing image. Raises DatasetError."""
    if not isinstance(name, str) or not name:
        raise DatasetError(f"{where}: an image must be a path, not {name!r}")
    path = folder / name
    if not is_file(path):
        why = "is a folder" if is_folder(path) else "does not exist"
        raise DatasetError(f"{where}: the image {path} {why}")
    return path


def picture_file(folder: Path, names: list[str], where: str) -> Path:
    """Returns the path of an existing image under one of these names. Otherwise DatasetError names the first."""
    for name in names[1:]:
        if is_file(folder / name):
            return folder / name
    return image_file(folder, names[0], where)


def items(file: Path, limit: int | None, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, object) of the first `limit` objects of a JSON list, or of the list under `key` if given."""
    data = read_json(file)
    if key:
        data = data.get(key) if isinstance(data, dict) else None
    if not isinstance(data, list):
        what = f"an object with a list '{key}'" if key else "a list of samples"
        raise DatasetError(f"{file} must be {what}")
    for i, item in enumerate(data[:limit], 1):
        if not isinstance(item, dict):
            raise DatasetError(f"{file} sample {i} is not a JSON object")
        yield f"{file} sample {i}", item


def text_field(data: dict[str, Any], key: str, where: str) -> str:
    """Returns a required text that is not blank. Raises DatasetError."""
    value = data.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DatasetError(f"{where}: '{key}' must be a text, {f'not {value!r}' if key in data else 'and is missing'}")
    return value


def check_marks(lines: tuple[DialogMessage, ...], where: str) -> None:
    """Raises DatasetError for a message with marks whose number differs from its number of images."""
    for line in lines:
        marks = places(line.text)
        if marks and marks != len(line.images):
            raise DatasetError(f"{where}: the text has {marks} places {IMAGE} for {len(line.images)} images")
