"""Finds pictures in a message: paths of files that are dragged, pasted or typed anywhere in it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pykvedge.cli import paths
from pykvedge.errors import ImageError, UsageError
from pykvedge.models.documents import PageSize, file_of, load_pictures
from pykvedge.models.images import Picture
from pykvedge.models.prompt import places

WINDOWS = os.name == "nt"
_SUFFIX = r"\.(?:png|jpe?g|webp|bmp|gif|pdf(?:\[[\d,-]+\])?)"  # a name with this ending is meant as a picture
_NAMED = re.compile(_SUFFIX + r"\Z", re.I)
_START = re.compile(r"""\A\s*(?=\S)|(?<!\S)[(\[]?(?=['"]|\S*[./\\])""")  # the start of a word that may be a path
_URL, _WORD, _LINE = re.compile(r"file:\S+", re.I), re.compile(r"\S+"), re.compile(r".+\Z")
_SHELL = re.compile(r"""(?:'[^'\n]*'|"(?:\\.|[^"\\\n])*"|\\.|[^\s'"\\])+""")  # dragged files on Linux and macOS
_QUOTED = re.compile(r'"[^"\n]+"')  # dragged files on Windows
_BLANKS = re.compile(rf"(?:~|\.{{0,2}}/|[A-Za-z]:[\\/]).{{1,1000}}?{_SUFFIX}(?!\w)", re.I)  # with unquoted blanks
_CLOSING = ".,;:!?)]}'\"\u3002\uff1f\uff01\uff0c"  # after a path, these belong to the sentence
_MOST, _MAX_CLOSING = 4096, 8  # characters of a path, and of the closing signs after it
_SENTENCE = re.compile(r"[\n.:;!?\u3002\uff1f\uff01][)'\"]?\s*\Z")  # a sentence ends here


@dataclass
class Mentioned:
    """A message and its pictures. text: without the paths of pictures. hints: about paths that stay in the text."""

    text: str
    pictures: list[Picture] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)


def looks_like_path(word: str, windows: bool = WINDOWS) -> bool:
    """Returns whether a word may be the path of a picture. A command is no path."""
    return "/" in word[1:] or bool(_NAMED.search(word)) or (windows and "\\" in word)


def mentioned(text: str, number: int, size: PageSize | None = None) -> Mentioned:
    """Finds the pictures that a message names. number: of the first picture, as in "image 1". size: of PDF pages.

    A path inside a sentence becomes "image 1". A path before or after all sentences is removed from the text; so is
    every path if the message marks the places of its images.
    Raises ImageError for a broken picture.
    """
    found = Mentioned("")
    parts: list[tuple[str, int]] = []  # text, and how many pictures the path behind it has
    at = copied = 0
    while begins := _START.search(text, at):
        at, pictures = _at(text, begins.end(), found.hints, size)
        if pictures:
            parts.append((text[copied : begins.end()], len(pictures)))
            found.pictures += pictures
            copied = at
    rest = text[copied:]
    for i, (before, count) in enumerate(parts):
        found.text += before
        is_last = not any(later.strip() for later in (*(part for part, _ in parts[i + 1 :]), rest))
        if not found.text.strip() or (is_last and _SENTENCE.search(found.text)) or places(text):
            found.text = found.text.rstrip(" ")
        else:
            found.text += f"image {number}" if count == 1 else f"images {number} to {number + count - 1}"
        number += count
    found.text = (found.text + rest).strip()
    return found


def named(text: str) -> Path | None:
    """Returns the first picture or PDF of this machine whose path is in a text, or None."""
    for begins in _START.finditer(text):
        for _, path in candidates(text, begins.end()):
            if _NAMED.search(path.name) and os.path.isfile(file_of(path)):  # noqa: PTH113 - as in _at()
                return path
    return None


def _at(text: str, start: int, hints: list[str], size: PageSize | None) -> tuple[int, list[Picture]]:
    """Reads the pictures of a path that begins at `start`, or a word. Returns its end and the pictures."""
    for end, path in candidates(text, start):
        if os.path.isfile(file_of(path)):  # noqa: PTH113 - Path.is_file raises for a long name
            try:
                return end, list(load_pictures(path, size))
            except ImageError:
                if _NAMED.search(path.name):
                    raise
                hints.append(f"{path} is not a picture, so its path stays text in the message")
                return end, []
    word = _WORD.match(text, start)
    end = word.end() if word else len(text)
    name = text[start:end].strip(_CLOSING)
    if _NAMED.search(name):
        hints.append(f"the file {name} does not exist, so its path stays text in the message")
    return end, []


def candidates(text: str, start: int, windows: bool = WINDOWS) -> Iterator[tuple[int, Path]]:
    """Yields paths that may begin at `start`, and their ends: quoted, escaped, as URLs, with blanks, before a comma."""
    begun = not text[:start].strip()
    for form in (_URL, _QUOTED if windows else _SHELL, _BLANKS, _WORD, *([_LINE] if begun else [])):
        match = form.match(text, start)
        if match is None or len(match.group()) > _MOST:
            continue
        whole = match.group().rstrip()
        closing = min(len(whole) - len(whole.rstrip(_CLOSING)), _MAX_CLOSING)
        for n in range(closing, -1, -1) if form is _URL else range(closing + 1):  # a URL may have a ? and go on
            written = whole[: len(whole) - n]
            with suppress(UsageError, ValueError, IndexError):  # an open quote, or an unknown home folder
                if form is _URL:
                    path = paths.typed(written)
                else:
                    plain = shlex.split(written)[0] if form is _SHELL else written.strip('"')
                    path = paths.expanded(plain)
                if looks_like_path(str(path), windows):
                    yield start + len(written), path
