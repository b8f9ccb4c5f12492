"""Evaluation sets: seeded, endless, with scenes of the held-out side only."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from .prompts import messages
from .scenes import PARTS, Scene, draw_scene, part_of, render
from .tasks import NEEDLE_TASKS, SINGLE_TASKS, TASKS, Asker, Question, ask_difference, recolour

Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Sample:
    """A question about one or several scenes. `question.answer` is the reference."""

    task: str
    scenes: tuple[Scene, ...]
    question: Question
    second_turn: bool = False

    @property
    def answer(self) -> str:
        return self.question.answer

    def images(self) -> list[np.ndarray]:
        """Returns the pictures, uint8 [240, 240, 3] each."""
        return [render(s) for s in self.scenes]

    def messages(self) -> list[dict[str, str]]:
        """Returns the conversation, with one media marker per image."""
        return messages(len(self.scenes), self.question.text, self.second_turn)


def draw_sample(rng: np.random.Generator, task: str, images: int, second_turn: bool, held_out: bool = True) -> Sample:
    """Draws a sample. `images` (2 or more) counts for needle tasks; "difference" has two images, other tasks one."""
    if task == "difference":
        first = draw_scene(rng, held_out)
        second, which = recolour(rng, first)
        return Sample(task, (first, second), ask_difference(first, second, which), second_turn)
    count = images if task in NEEDLE_TASKS else 1
    if task in NEEDLE_TASKS and count < 2:
        raise ValueError(f"task {task} needs two or more images, not {count}")
    ask = SINGLE_TASKS.get(task) or NEEDLE_TASKS[task]
    while True:
        scenes = tuple(draw_scene(rng, held_out) for _ in range(count))
        question = ask(rng, scenes, int(rng.integers(0, count)))
        if question is not None:
            return Sample(task, scenes, question, second_turn)


def samples(
    task: str, seed: int = 0, images: int = 4, second_turn: bool = False, part: str = ""
) -> Iterator[Sample]:
    """Yields endless held-out samples. Sample n does not depend on the samples before it.

    part: one of PARTS, whose scenes are in no other part; "": all.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")

    def draw(rng: np.random.Generator) -> tuple[tuple[Scene, ...], Sample]:
        sample = draw_sample(rng, task, images, second_turn)
        return sample.scenes, sample

    for _, sample in _endless(draw, part, seed, TASKS.index(task), images, int(second_turn)):
        yield sample


def _endless(
    draw: Callable[[np.random.Generator], tuple[tuple[Scene, ...], Drawn]], part: str, *seed: int
) -> Iterator[tuple[tuple[Scene, ...], Drawn]]:
    """Yields scenes of a part with their questions. Draw number n has its own random generator."""
    if part and part not in PARTS:
        raise ValueError(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    for number in itertools.count():
        rng = np.random.default_rng((*seed, number))
        drawn = draw(rng)
        while part and any(part_of(scene.code) != part for scene in drawn[0]):
            drawn = draw(rng)
        yield drawn


def chain(
    tasks: Sequence[str], seed: int = 0, images: int = 4, part: str = ""
) -> Iterator[tuple[tuple[Scene, ...], list[Question]]]:
    """Yields endless held-out scenes, each with one question per task. All questions of a draw differ.

    tasks: all from SINGLE_TASKS (one image), or all from NEEDLE_TASKS (`images` images). Draw n does not depend on the
    draws before it. part: see samples(). Raises ValueError for other tasks.
    """
    if not tasks or not (set(tasks) <= set(SINGLE_TASKS) or set(tasks) <= set(NEEDLE_TASKS)):
        raise ValueError(f"questions about the same scenes must all be from {list(SINGLE_TASKS)}, or all from "
        f"{list(NEEDLE_TASKS)}")
    count, places = 1 if tasks[0] in SINGLE_TASKS else images, [TASKS.index(task) for task in tasks]
    yield from _endless(lambda rng: draw_chain(rng, tasks, count), part, seed, len(TASKS), *places, count)


def draw_chain(
    rng: np.random.Generator, tasks: Sequence[str], count: int, held_out: bool = True
) -> tuple[tuple[Scene, ...], list[Question]]:
    """Draws `count` scenes and one question per task. All questions differ. tasks: see chain()."""
    askers: list[Asker] = [SINGLE_TASKS.get(task) or NEEDLE_TASKS[task] for task in tasks]
    while True:
        scenes = tuple(draw_scene(rng, held_out) for _ in range(count))
        asked = [ask(rng, scenes, int(rng.integers(0, count))) for ask in askers]
        found = [question for question in asked if question is not None]
        if len(found) == len(askers) and len({question.text for question in found}) == len(found):
            return scenes, found


def write_set(folder: Path, chosen: list[Sample], name: str = "samples.jsonl") -> Path:
    """Writes the samples as one JSON line each, and their pictures as PNG files beside it."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for n, sample in enumerate(chosen):
        files = []
        for k, picture in enumerate(sample.images()):
            files.append(f"{n:03d}-{sample.task}-{k + 1}.png")
            Image.fromarray(picture).save(folder / files[-1], optimize=True)
        lines.append(
            {"task": sample.task, "second_turn": sample.second_turn, "images": files}
            | {"messages": sample.messages(), "answer": sample.answer}
        )
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def fixed_set(per_task: int = 1, seed: int = 2026) -> list[Sample]:
    """Returns the small set in the repository: every task, asked in the first turn and in the second turn."""
    chosen = []
    for task in TASKS:
        for second_turn in (False, True):
            drawn = samples(task, seed, 4, second_turn)
            chosen += [next(drawn) for _ in range(per_task)]
    return chosen
