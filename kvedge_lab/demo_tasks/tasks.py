"""Questions about scenes, with reference answers.

Each `ask_*` returns a `Question`: its text, its answer, and (for training) the source of each word of the answer. It
returns None if the scenes allow no unambiguous question of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .scenes import COLOURS, PLURALS, SHAPES, Item, Scene, place

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
# a cell in an image: (image, row, column)
Cell = tuple[int, int, int]


@dataclass(frozen=True)
class Question:
    """`sources`: the cells shown by each word of the answer. Commas and characters of a code count as words."""

    task: str
    text: str
    answer: str
    sources: tuple[tuple[Cell, ...], ...] = ()


def _pick(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(0, len(options)))]


def _of(scenes: Sequence[Scene], k: int) -> str:
    """Returns the part of a question that names image k; "" if there is only one image."""
    return "" if len(scenes) == 1 else f" in image {k + 1}"


def _cell(k: int, item: Item) -> Cell:
    return (k, item.row, item.col)


def _code_cells(k: int, scene: Scene) -> list[tuple[Cell, ...]]:
    return [((k, scene.code_row, scene.code_col + c),) for c in range(len(scene.code))]


def ask_colour(rng: np.random.Generator, scenes: Sequence[Scene], k: int) -> Question | None:
    unique = [i for i in scenes[k].items if len(scenes[k].where(shape=i.shape)) == 1]
    if not unique:
        return None
    item: Item = _pick(rng, unique)
    text = f"What colour is the {item.shape}{_of(scenes, k)}?"
    return Question("colour", text, item.colour, ((_cell(k, item),),))


def ask_shape(rng: np.random.Generator, scenes: Sequence[Scene], k: int) -> Question | None:
    unique = [i for i in scenes[k].items if len(scenes[k].where(colour=i.colour)) == 1]
    if not unique:
        return None
    item: Item = _pick(rng, unique)
    text = f"What shape is the {item.colour} object{_of(scenes, k)}?"
    return Question("shape", text, item.shape, ((_cell(k, item),),))


def ask_count(rng: np.random.Generator, scenes: Sequence[Scene], k: int) -> Question | None:
    """Asks about half of the questions for the largest group, so no count is rare."""
    shapes = sorted({i.shape for i in scenes[k].items})
    if rng.integers(0, 2):
        largest = max(len(scenes[k].where(shape=s)) for s in shapes)
        shapes = [s for s in shapes if len(scenes[k].where(shape=s)) == largest]
    shape: str = _pick(rng, shapes)
    found = scenes[k].where(shape=shape)
    text = f"How many {PLURALS[shape]} are there{_of(scenes, k)}?"
    return Question("count", text, NUMBERS[len(found)], (tuple(_cell(k, i) for i in found),))


def ask_where(rng: np.random.Generator, scenes: Sequence[Scene], k: int) -> Question | None:
    unique = [i for i in scenes[k].items if len(scenes[k].where(i.shape, i.colour)) == 1]
    if not unique:
        return None
    item: Item = _pick(rng, unique)
    text = f"Where is the {item.name}{_of(scenes, k)}?"
    return Question("where", text, f"at the {item.place}", ((_cell(k, item),),) * 4)


def ask_code(rng: np.random.Generator, scenes: Sequence[Scene], k: int) -> Question | None:
    task = "code" if len(scenes) == 1 else "code-in-image-k"
    cells = _code_cells(k, scenes[k])
    return Question(task, f"What is the code{_of(scenes, k)}?", scenes[k].code, (cells[0], *cells))


def describe(scene: Scene) -> str:
    """Returns the description: objects in reading order, then the code."""
    articles = ["an" if i.colour[0] in "aeiou" else "a" for i in scene.items]
    objects = ", ".join(f"{a} {i.name} at the {i.place}" for a, i in zip(articles, scene.items, strict=True))
    return f"{objects}, and the code {scene.code} at the {place(scene.code_row, scene.code_col)}."


def ask_describe(rng: np.random.Generator, scenes: Sequence[Scene], k: int) -> Question | None:
    """Asks for everything in the picture. Each object has eight words in the answer, including its comma."""
    target = " the image" if len(scenes) == 1 else f" image {k + 1}"
    sources: list[tuple[Cell, ...]] = []
    for item in scenes[k].items:
        sources += [(_cell(k, item),)] * 8
    cells = _code_cells(k, scenes[k])
    sources += [cells[0]] * 4 + cells + [cells[0]] * 5
    return Question("describe", f"Describe{target}.", describe(scenes[k]), tuple(sources))


def ask_which_image(rng: np.random.Generator, scenes: Sequence[Scene], k: int) -> Question | None:
    """Asks for the image with an object that occurs once, in image k alone."""
    if len(scenes) == 1:
        return None
    unique = [i for i in scenes[k].items if sum(len(s.where(i.shape, i.colour)) for s in scenes) == 1]
    if not unique:
        return None
    item: Item = _pick(rng, unique)
    answer = f"image {k + 1}, at the {item.place}"
    return Question("which-image", f"Which image has the {item.name}?", answer, ((_cell(k, item),),) * 8)


def recolour(rng: np.random.Generator, scene: Scene) -> tuple[Scene, int]:
    """Returns a copy of the scene in which one object has another colour, and the number of that object."""
    which = int(rng.integers(0, len(scene.items)))
    colours = [c for c in COLOURS if c != scene.items[which].colour]
    changed = replace(scene.items[which], colour=_pick(rng, colours))
    return replace(scene, items=(*scene.items[:which], changed, *scene.items[which + 1 :])), which


def ask_difference(first: Scene, second: Scene, which: int, at: int = 0) -> Question:
    """Asks for the object number `which`, whose colour differs between images at + 1 and at + 2."""
    a, b = first.items[which], second.items[which]
    answer = f"the {a.shape} at the {a.place} is {a.colour} in image {at + 1} and {b.colour} in image {at + 2}"
    text = f"What is the difference between image {at + 1} and image {at + 2}?"
    return Question("difference", text, answer, ((_cell(at + 1, b),),) * 18)


Asker = Callable[[np.random.Generator, Sequence[Scene], int], "Question | None"]
SINGLE_TASKS: dict[str, Asker] = {
    "colour": ask_colour,
    "shape": ask_shape,
    "count": ask_count,
    "where": ask_where,
    "code": ask_code,
    "describe": ask_describe,
}
NEEDLE_TASKS: dict[str, Asker] = {"which-image": ask_which_image, "code-in-image-k": ask_code}
TASKS = (*SINGLE_TASKS, *NEEDLE_TASKS, "difference")
assert len(SHAPES) == len(COLOURS)
