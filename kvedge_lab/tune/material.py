"""The questions of a tuning run: contexts of one picture or several, each with some questions.

No picture is in two contexts, so contexts are independent, as the intervals require. Even ones choose, odd ones prove.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import numpy as np

from kvedge_lab.demo_tasks import evalset
from kvedge_lab.demo_tasks.scenes import Scene
from kvedge_lab.eval.files import read_text
from kvedge_lab.eval.tasks import DialogMessage, Sample, named
from kvedge_lab.tune import sheets
from pykvedge.errors import ImageError, SaveError, UsageError
from pykvedge.models.images import picture_size
from pykvedge.system.shown import counted

ALONE = ("Describe the image.", "What text is in the picture?", "What is at the top, and what is at the bottom?")
SEVERAL = ("Describe each image.", "What is the difference between the images?")
_SCENE_TASKS = ("describe", "code", "where")
_SCENES_TASKS = ("which-image", "code-in-image-k")
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
MOST = 600  # largest number of pictures from a folder
ASKED = 3  # questions from a user's file per context


@dataclass(frozen=True)
class Material:
    """contexts: endless if pictures are drawn. notes: remarks for the user about the choice of pictures."""

    source: str
    contexts: Iterator[list[Sample]]
    notes: tuple[str, ...] = ()
    size: int = 0  # number of contexts; 0: endless


def scenes(seed: int, questions: Sequence[str]) -> Material:
    """Returns scenes that the packaged model knows. `questions` replace the scenes' questions."""

    def drawn() -> Iterator[list[Sample]]:
        alone = evalset.chain(_SCENE_TASKS, seed, 1)
        several = evalset.chain(_SCENES_TASKS, seed, 3)
        for n in count():
            found, asked = next(several if n % 4 >= 2 else alone)
            yield _context(f"scene-{n}", found, _some(questions, seed, n) or [one.text for one in asked])

    return Material(f"scenes drawn by kvedge, seed {seed}", drawn())


def drawn_pages(seed: int, questions: Sequence[str], folder: Path) -> Material:
    """Returns pages with text, tables and charts, drawn into files of a folder."""

    def drawn() -> Iterator[list[Sample]]:
        number = count()
        for n in count():
            several = n % 4 >= 2
            files = {folder / f"page-{seed}-{page}.png": page for page in islice(number, 3 if several else 1)}
            try:
                for file, page in files.items():
                    sheets.draw(file, seed, page)
            except OSError as error:
                raise SaveError(f"{folder} cannot be written: {error.strerror or error}") from None
            asked = _some(questions, seed, n) or (SEVERAL if several else ALONE)
            yield _context(f"page-{n}", list(files), asked)

    return Material(f"pages drawn by kvedge, seed {seed}", drawn())


def folder(path: Path, seed: int, questions: Sequence[str], least: int) -> Material:
    """Returns the user's pictures, at most MOST, in an order that the seed determines. Raises UsageError."""
    try:
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    if not path.is_dir():
        raise UsageError(f"--images {path} is not a folder; name a folder")
    order = np.random.default_rng(seed).permutation(len(files))
    good, broken = list[Path](), list[Path]()
    for i in order:
        if len(good) == MOST:
            break
        (good if _opens(files[int(i)]) else broken).append(files[int(i)])
    notes = []
    if broken:
        which = "is left out, because it" if len(broken) == 1 else "are left out, because they"
        notes.append(f"{counted(len(broken), 'picture')} {which} cannot be read: {_named(broken)}")
    if len(good) == MOST:
        notes.append(f"{path} has {len(files)} pictures; {MOST} of them are used, chosen with seed {seed}")
    contexts, at = list[list[Sample]](), 0
    while at < len(good):
        n = len(contexts)
        size = 2 if n % 4 >= 2 and at + 2 <= len(good) else 1
        asked = _some(questions, seed, n) or (SEVERAL if size == 2 else ALONE)
        contexts.append(_context(f"folder-{n}", good[at : at + size], asked))
        at += size
    if len(contexts) < least:
        why = f" ({notes[0]})" if broken else ""
        raise UsageError(
            f"--images {path} has {len(good)} usable pictures{why}, but at least {least * 3 // 2} are needed; add "
            f"pictures"
        )
    digest = hashed(map(named, good))
    return Material(f"{len(good)} pictures of {path.name} ({digest}), seed {seed}", iter(contexts), tuple(notes),
                    len(contexts))  # fmt: skip


def read_questions(path: Path) -> list[str]:
    """Reads questions from a file, one per line, each once. Raises UsageError."""
    found = list(dict.fromkeys(line.strip() for line in read_text(path).splitlines() if line.strip()))
    if not found:
        raise UsageError(f"{path} has no questions; write one question per line")
    return found


def hashed(texts: Iterable[str]) -> str:
    """Returns a digest of texts; "" without texts."""
    lines = "".join(f"{text}\n" for text in texts)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:12] if lines else ""


def for_way(context: Sequence[Sample], way: str) -> list[Sample]:
    """Returns the samples of a context, with ids that name the way of compression."""
    return [replace(one, id=f"{one.id}:{way}", task=f"{one.task}, {way}") for one in context]


def _context(name: str, images: Sequence[Path | Scene], questions: Sequence[str]) -> list[Sample]:
    task = "one picture" if len(images) == 1 else "several pictures"
    return [Sample(f"{name}:{i}", task, (DialogMessage("user", text, tuple(images)),), "", "ppl", context=name)
            for i, text in enumerate(questions)]  # fmt: skip


def _some(questions: Sequence[str], seed: int, number: int) -> list[str]:
    order = np.random.default_rng((seed, number)).permutation(len(questions))[:ASKED]
    return [questions[int(i)] for i in sorted(order)]


def _opens(path: Path) -> bool:
    try:
        picture_size(path)
    except ImageError:
        return False
    return True


def _named(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more
