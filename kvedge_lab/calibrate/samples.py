"""Prompts for calibration: scenes that kvedge draws, or the user's images with boxes.

The place of everything that an answer names is known in a scene. Scenes come from the training side of the demo model,
so evaluation sets stay unseen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvedge_lab.demo_tasks.evalset import Sample, draw_chain, draw_sample
from kvedge_lab.demo_tasks.scenes import CELL, Item, Scene, render
from kvedge_lab.demo_tasks.tasks import NEEDLE_TASKS, SINGLE_TASKS
from kvedge_lab.eval.files import parsed, read_text
from pykvedge.errors import ImageError, UsageError
from pykvedge.models.images import Picture, load_picture
from pykvedge.models.prompt import Message

TASKS = {
    "visual-heads": ("code", "describe", "colour", "shape", "where"),
    "retrieval-heads": ("code-in-image-k", "which-image"),
    "prefix": ("code", "describe", "where", "code-in-image-k", "which-image", "difference"),
    "key-redundancy": ("code", "describe", "where", "code-in-image-k", "which-image", "difference"),
    "head-budgets": ("code", "describe", "where", "code-in-image-k", "which-image", "difference"),
}
LABELLED = ("visual-heads", "retrieval-heads")  # the other kinds need no boxes
IMAGES = 4  # images of tasks that look for one image among several
SEED = 2024
_FIELDS = {"image", "images", "question", "answer", "boxes", "needle", "id", "earlier"}


@dataclass(frozen=True)
class Box:
    """A box in an image, and its text.

    pixels: (left, top, right, bottom). text: what an answer says about the box. span: the place of the text in the
    reference answer, as characters (from, to), if the text alone is ambiguous.
    """

    image: int
    pixels: tuple[float, float, float, float]
    text: str
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Labelled:
    """A question about images, with the places that its answer is read from: boxes, or a piece of the question.

    earlier: earlier questions about the images and their answers; the images are with the first question.
    """

    question: str
    pictures: tuple[Picture, ...]
    boxes: tuple[Box, ...] = ()
    needle: str = ""
    answer: str = ""
    earlier: tuple[tuple[str, str], ...] = ()

    def messages(self) -> list[Message]:
        """Returns the conversation up to the question."""
        asked = [text for pair in self.earlier for text in pair] + [self.question]
        roles = itertools.cycle(("user", "assistant"))
        return [Message(role, text, list(self.pictures) if i == 0 else [])
                for i, (role, text) in enumerate(zip(roles, asked, strict=False))]  # fmt: skip


def _cell(row: int, col: int) -> tuple[float, float, float, float]:
    return (col * CELL, row * CELL, (col + 1) * CELL, (row + 1) * CELL)


def _code(image: int, scene: Scene, start: int) -> list[Box]:
    """Returns one box per character. start: place of the code in the answer."""
    return [
        Box(image, _cell(scene.code_row, scene.code_col + i), char, (start + i, start + i + 1))
        for i, char in enumerate(scene.code)
    ]


def _object(image: int, item: Item, answer: str, text: str, start: int = 0) -> Box:
    at = answer.index(text, start)
    return Box(image, _cell(item.row, item.col), text, (at, at + len(text)))


def _described(scene: Scene, answer: str) -> list[Box]:
    out, at = _code(0, scene, answer.rindex(f"code {scene.code}") + len("code ")), 0
    for item in scene.items:  # items are in the order of the answer
        out.append(_object(0, item, answer, item.name, at))
        at = out[-1].span[1] if out[-1].span else at
    return out


def boxes_of(sample: Sample) -> tuple[Box, ...]:
    """Returns the boxes of what the answer names, for the tasks of visual-heads and retrieval-heads."""
    answer, sources = sample.answer, sample.question.sources
    image, row, col = sources[0][0]
    scene = sample.scenes[image]
    if sample.task in ("code", "code-in-image-k"):
        return tuple(_code(image, scene, 0))
    if sample.task == "describe":
        return tuple(_described(scene, answer))
    item = next(i for i in scene.items if (i.row, i.col) == (row, col))
    if sample.task == "which-image":
        return (_object(image, item, answer, str(image + 1)), _object(image, item, answer, item.place))
    return (_object(image, item, answer, item.place if sample.task == "where" else answer),)


def scenes(kind: str, seed: int = SEED, questions: int = 1) -> Iterator[Labelled]:
    """Yields endless samples for a kind of profile; a seed gives the same samples.

    questions: largest number of questions about the same images; the last question is the sample's.
    """
    for number in itertools.count():
        rng = np.random.default_rng((seed, number))
        if questions > 1:
            yield _conversation(rng, TASKS[kind], number, questions)
            continue
        task = TASKS[kind][number % len(TASKS[kind])]
        sample = draw_sample(rng, task, IMAGES, second_turn=False, held_out=False)
        boxes = boxes_of(sample) if kind in LABELLED else ()
        yield Labelled(sample.question.text, _pictures(sample.scenes), boxes, answer=sample.answer)


def _conversation(rng: np.random.Generator, tasks: Sequence[str], number: int, questions: int) -> Labelled:
    """Draws a conversation. One image and several images alternate; the number of questions grows from 1 in cycles."""
    of = NEEDLE_TASKS if number % 2 else SINGLE_TASKS
    fitting = rng.permutation([task for task in tasks if task in of]).tolist()
    chosen = list(itertools.islice(itertools.cycle(fitting), 1 + number // 2 % questions))
    drawn, asked = draw_chain(rng, chosen, IMAGES if number % 2 else 1, held_out=False)
    *earlier, (question, answer) = [(one.text, one.answer) for one in asked]
    return Labelled(question, _pictures(drawn), answer=answer, earlier=tuple(earlier))


def _pictures(drawn: Iterable[Scene]) -> tuple[Picture, ...]:
    return tuple(load_picture(render(scene), f"scene {i + 1}") for i, scene in enumerate(drawn))


def read_jsonl(path: Path) -> list[Labelled]:
    """Reads the user's samples, one JSON object per line:

        {"image": "a.jpg", "question": "What does the sign say?", "answer": "Open until 5",
         "boxes": [{"box": [left, top, right, bottom], "text": "Open until 5"}]}

    "images": a list instead of "image"; a box then names its image by "image": 0, 1, ... Paths are relative to the
    file. A box without "text" stands for the whole answer. "needle": a piece of the question that answers it.
    "earlier": earlier questions and answers, [{"question": "...", "answer": "..."}].
    Raises UsageError with the number of the line.
    """
    out = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                out.append(_parse(line, path.parent))
            except (UsageError, ImageError) as error:
                raise UsageError(f"{path}, line {number}: {error}") from None
    if not out:
        raise UsageError(f"{path} has no samples; write one JSON object per line")
    return out


def _parse(line: str, folder: Path) -> Labelled:
    try:
        data = parsed(line)
    except ValueError as error:
        raise UsageError(f"the line is not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("question"), str) or not data["question"].strip():
        raise UsageError('a JSON object with a "question" is expected')
    unknown = sorted(set(data) - _FIELDS)
    if unknown:
        raise UsageError(f'unknown field "{unknown[0]}"; known fields: {", ".join(sorted(_FIELDS))}')
    names = data.get("images", [data["image"]] if "image" in data else [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError('"images" must be a list of paths')
    answer, needle, boxes = data.get("answer", ""), data.get("needle", ""), data.get("boxes", [])
    if not isinstance(answer, str) or not isinstance(needle, str) or not isinstance(boxes, list):
        raise UsageError('"answer" and "needle" must be text, "boxes" a list')
    if needle and boxes:
        raise UsageError('a sample must not have both "boxes" and a "needle"')
    if needle and data["question"].count(needle) != 1:
        raise UsageError('the "needle" must occur in the question exactly once')
    pictures = tuple(load_picture(folder / Path(name).expanduser()) for name in names)
    found, earlier = tuple(_box(b, pictures, answer) for b in boxes), _earlier(data.get("earlier", []))
    return Labelled(data["question"], pictures, found, needle, answer or needle, earlier)


def _earlier(data: Any) -> tuple[tuple[str, str], ...]:
    rows = data if isinstance(data, list) else [None]
    if any(not isinstance(row, dict) or set(row) != {"question", "answer"} for row in rows) or any(
        not isinstance(text, str) or not text.strip() for row in rows for text in row.values()
    ):
        raise UsageError('"earlier" must be a list of {"question": "...", "answer": "..."}')
    return tuple((row["question"], row["answer"]) for row in rows)


def _box(data: Any, pictures: tuple[Picture, ...], answer: str) -> Box:
    if not isinstance(data, dict) or not isinstance(data.get("box"), list) or len(data["box"]) != 4:
        raise UsageError('a box must be {"box": [left, top, right, bottom], "text": "..."}')
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in data["box"]):
        raise UsageError("a box must be four numbers of pixels")
    image, text = data.get("image", 0), data.get("text", answer)
    if isinstance(image, bool) or not isinstance(image, int) or not 0 <= image < len(pictures):
        raise UsageError(f"a box names image {image!r}, but the sample has {len(pictures)} images, counted from 0")
    if not isinstance(text, str) or not text.strip():
        raise UsageError('a box needs a "text", or the sample needs an "answer"')
    left, top, right, bottom = (float(x) for x in data["box"])
    inside = 0 <= left < right <= pictures[image].width and 0 <= top < bottom <= pictures[image].height
    if not inside:
        size = f"{pictures[image].width} x {pictures[image].height}"
        raise UsageError(f"the box {data['box']} is not inside its image of {size} pixels")
    return Box(image, (left, top, right, bottom), text.strip())
