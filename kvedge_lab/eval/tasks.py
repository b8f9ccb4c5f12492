"""Samples: conversations with images up to a question, with a reference answer. Also makes demo and page tasks."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TypeVar

from kvedge_lab.demo_tasks import evalset
from kvedge_lab.demo_tasks.prompts import MEDIA, SHOW_ANSWER, messages, show_text
from kvedge_lab.demo_tasks.scenes import Scene, render
from kvedge_lab.demo_tasks.tasks import NEEDLE_TASKS, SINGLE_TASKS, TASKS
from kvedge_lab.eval import metrics, vqa
from kvedge_lab.eval.cider import Corpus
from kvedge_lab.page_tasks import evalset as page_sets
from kvedge_lab.page_tasks import pages
from kvedge_lab.page_tasks.pages import Page
from kvedge_lab.page_tasks.tasks import TASKS as PAGE_TASKS
from pykvedge.errors import DatasetError, UsageError, unknown
from pykvedge.models.images import Picture, load_picture
from pykvedge.models.prompt import IMAGE, Message

T = TypeVar("T")
SECOND = "/2"  # end of the name of a demo or page task whose question comes in the second turn
PAGES = "page-"  # start of the name of a page task
Image = Path | Scene | Page
THEN = "+"  # between demo tasks whose questions are about the same scenes
SEVERAL = (*vqa.SCORES, "cider")  # scores that take several references
ALONE = {"exact": metrics.exact_match, "contains": metrics.contains, "rouge": metrics.rouge_l}
SCORES = ("exact", "choice", "contains", "rouge", *SEVERAL)
NO_SCORE = ("ppl", "kld")  # the reference answer's likelihood is measured, and no answer is scored


@dataclass(frozen=True)
class DialogMessage:
    """A message. role: system, user or assistant. images: in order of the marks in the text, or before the text."""

    role: str
    text: str
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A conversation whose last line is a user's. `answer` is the reference; `id` names the sample within a run.

    metric: how the answer is scored. max_tokens: of the generated answer; None: the run's value.
    groups: names under which the scores of several tasks are averaged, for example "T-1".
    others: more references, for the scores in SEVERAL; the likelihood uses `answer` only. corpus: for the metric cider.
    context: a name shared by samples that differ in their last question only; "": not shared.
    """

    id: str
    task: str
    lines: tuple[DialogMessage, ...]
    answer: str
    metric: str = "exact"
    choices: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    max_tokens: int | None = None
    others: tuple[str, ...] = ()
    context: str = ""
    corpus: Corpus | None = field(default=None, compare=False, repr=False)

    def messages(self) -> list[Message]:
        """Returns the messages with loaded pictures. Raises ImageError."""
        return [Message(line.role, line.text, [_picture(image) for image in line.images]) for line in self.lines]

    def score(self, answer: str) -> float | None:
        """Returns the answer's score in 0..1, or 0..10 for cider; None if the metric scores no answers."""
        if self.metric == "choice":
            return metrics.choice_match(answer, self.answer, self.choices)
        if self.metric in ALONE:
            return ALONE[self.metric](answer, self.answer)
        several = self.corpus.score if self.corpus is not None else vqa.SCORES.get(self.metric)
        return several(answer, (self.answer, *self.others)) if several else None

    def digest(self) -> str:
        """Returns a digest of the sample's content. A file of results is refused if a sample's digest differs."""
        lines = [[line.role, line.text, [named(image) for image in line.images]] for line in self.lines]
        text = json.dumps([self.task, lines, self.answer, self.choices, self.metric, *self.others])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_corpus(samples: list[Sample], where: str) -> list[Sample]:
    """Adds the corpus of all captions to samples with the metric cider. Raises DatasetError for a single one."""
    captioned = [(one.answer, *one.others) for one in samples if one.metric == "cider"]
    if not captioned:
        return samples
    if len(captioned) == 1:
        raise DatasetError(f"{where}: the metric cider needs samples of more than one picture")
    corpus = Corpus(captioned)
    return [replace(one, corpus=corpus) if one.metric == "cider" else one for one in samples]


def _picture(image: Image) -> Picture:
    if isinstance(image, Path):
        return load_picture(image)
    drawn, name = (pages.render(image), "page") if isinstance(image, Page) else (render(image), "scene")
    return load_picture(drawn, name)


def named(image: Image) -> str:
    """Returns the name of an image, with a digest of its file."""
    if not isinstance(image, Path):
        return repr(image)
    try:
        seen = image.stat()
        return f"{image.name} {_content(image, seen.st_size, seen.st_mtime_ns)}"
    except OSError:
        return f"{image.name} cannot be read"


@functools.cache
def _content(file: Path, *_: int) -> str:
    """Returns a hash of a file. The cache key includes its size and modification time."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def with_choices(question: str, choices: Iterable[str]) -> str:
    """Returns the question with its choices, in MileBench's wording."""
    listed = list(choices)
    if not listed:
        return question
    rows = []
    for i, choice in enumerate(listed):
        name = metrics.letter(i, len(listed)).upper()
        rows.append(f"{name}. {choice}" if name else choice)
    return f"{question}\nChoice list: \n" + "\n".join(rows) + "\nYour answer is: "


def demo_names() -> list[str]:
    """Returns the demo generator's tasks, each also as a second turn."""
    return [*TASKS, *(name + SECOND for name in TASKS)]


def demo_samples(
    name: str, count: int, seed: int, images: int, part: str = "", look: Callable[[], None] = lambda: None
) -> list[Sample]:
    """Draws `count` held-out samples of a demo task. Raises UnknownNameError.

    name: a task; a task with "/2", whose question comes in the second turn; or several tasks joined by "+", whose
    questions are asked about the same scenes in turn, each answered by its reference except the last. images: scenes of
    a sample of needle tasks. part: "search", "validation" or "test", with disjoint scenes; "": all. look: called
    for each sample. Answers are limited to twice the length of the reference: no longer answer can be right.
    """
    if THEN in name:
        return _chains(name, count, seed, images, part, look)
    if name not in demo_names():
        raise unknown("task", name, demo_names())
    task, second = name.removesuffix(SECOND), name.endswith(SECOND)
    if task in NEEDLE_TASKS:
        _check_images(task, images)
    drawn = _some(evalset.samples(task, seed, images, second, part), count, look)
    of = f"{name}:{seed}:{images}:{part}".removesuffix(":")
    return [_demo_sample(name, f"{of}:{n}", sample) for n, sample in enumerate(drawn)]


def page_names() -> list[str]:
    """Returns the tasks of the page generator, each also as a second turn."""
    return [PAGES + name + end for name in PAGE_TASKS for end in ("", SECOND)]


def page_samples(
    name: str, count: int, seed: int, images: int, look: Callable[[], None] = lambda: None
) -> list[Sample]:
    """Draws `count` held-out samples of a page task about `images` pages. look: called for each sample.

    Raises UnknownNameError, UsageError.
    """
    if name not in page_names():
        raise unknown("task", name, page_names())
    task, out = name.removeprefix(PAGES).removesuffix(SECOND), list[Sample]()
    if task == "which-page" and images < 2:
        raise UsageError(f"{name} needs 2 to {pages.MAX_PAGES} pages, not {images}")
    for n, sample in enumerate(_some(page_sets.samples(task, seed, images), count, look)):
        asked = messages(images, sample.question.text, name.endswith(SECOND), "page")
        lines = [DialogMessage(m["role"], m["content"].replace(MEDIA, IMAGE)) for m in asked]
        lines[0] = replace(lines[0], images=sample.pages)
        answer = sample.question.answer
        out.append(Sample(f"{name}:{seed}:{images}:{n}", name, tuple(lines), answer, max_tokens=_longest(answer)))
    return out


def _some(drawn: Iterable[T], count: int, look: Callable[[], None]) -> Iterator[T]:
    for one in islice(drawn, count):
        look()
        yield one


def _check_images(task: str, images: int) -> None:
    if not 2 <= images <= 8:
        raise UsageError(f"{task} needs 2 to 8 images, not {images}")


def _chains(name: str, count: int, seed: int, images: int, part: str, look: Callable[[], None]) -> list[Sample]:
    tasks = name.split(THEN)
    for task in tasks:
        if task not in TASKS:
            raise unknown("task", task, TASKS)
    if not (set(tasks) <= set(SINGLE_TASKS) or set(tasks) <= set(NEEDLE_TASKS)):
        raise UsageError(f"--tasks {name}: all questions must be from {', '.join(SINGLE_TASKS)}, or all from "
        f"{', '.join(NEEDLE_TASKS)}")  # fmt: skip
    if tasks[0] in NEEDLE_TASKS:
        _check_images(name, images)
    of, out = f"{name}:{seed}:{images}:{part}".removesuffix(":"), []
    for n, (scenes, asked) in enumerate(_some(evalset.chain(tasks, seed, images, part), count, look)):
        lines = [DialogMessage("user", asked[0].text, scenes)]
        for before, question in pairwise(asked):
            lines += [DialogMessage("assistant", before.answer), DialogMessage("user", question.text)]
        answer = asked[-1].answer
        out.append(Sample(f"{of}:{n}", name, tuple(lines), answer, max_tokens=_longest(answer)))
    return out


def _demo_sample(name: str, identity: str, sample: evalset.Sample) -> Sample:
    question = sample.question.text
    if sample.second_turn:
        shown = DialogMessage("user", show_text(len(sample.scenes)), sample.scenes)
        asked = DialogMessage("user", question)
        lines: tuple[DialogMessage, ...] = (shown, DialogMessage("assistant", SHOW_ANSWER), asked)
    else:
        lines = (DialogMessage("user", question, sample.scenes),)
    return Sample(identity, name, lines, sample.answer, max_tokens=_longest(sample.answer))


def _longest(answer: str) -> int:
    return 2 * len(answer.replace(",", " ,").split()) + 16
