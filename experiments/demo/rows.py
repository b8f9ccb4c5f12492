"""Training rows of the text model: the images once, then several questions that see the images but not each other.

Some questions follow another question and its answer, as a conversation goes on: these see both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvedge_lab.demo_tasks.prompts import MEDIA, SHOW_ANSWER, image_text, show_text
from kvedge_lab.demo_tasks.scenes import GRID, Scene, draw_scene
from kvedge_lab.demo_tasks.tasks import NEEDLE_TASKS, SINGLE_TASKS, Question, ask_difference, recolour

from .tokenizer import BOS, EOS, Tokenizer
from .vision import COLOUR_NAMES, N_PATCHES, patch_labels

# Pairs of a usual and another wording. All pairs of a set are applied together.
WORDINGS = (
    (("What colour is", "What color is"), ("Describe the image", "Describe this image")),
    (("What colour is", "What is the colour of"), ("What shape is", "What is the shape of"), ("the code", "this code")),
    (("What colour is", "Which colour is"), ("What shape is", "Which shape is"), (" are there", "")),
)
MAX_SOURCES = 5
IGNORE = -100
FOLLOWS = 0.35  # share of the later questions that follow the answer to the previous one


@dataclass(frozen=True)
class Style:
    """The form of a question.

    turn: 0 with the images, 1 after a turn that only shows them, 2 after another question and its answer.
    rare: the rarer form of the text before the question.
    spaced: the answer is only history and is not learnt; it has the template's space before it.
    """

    turn: int
    rare: bool
    spaced: bool


@dataclass
class Row:
    """Per token: id (-1: patch), position, branch (0: visible to all), target, and the source cells of the target."""

    scenes: list[Scene]
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    sources: list[tuple] = field(default_factory=list)
    patches: list[tuple[int, int]] = field(default_factory=list)
    changed_from: int = -1  # the first of two images that differ in one object

    def add(self, tokens: list[int], start: int, branch: int) -> None:
        self.ids += tokens
        self.positions += range(start, start + len(tokens))
        self.branch += [branch] * len(tokens)
        self.targets += [IGNORE] * len(tokens)
        self.sources += [()] * len(tokens)


def shown_patches(rng: np.random.Generator, scene: Scene, background: int) -> np.ndarray:
    """Returns patches that show something, and some plain ones. Training skips the others, not their positions."""
    shown = patch_labels(scene)[:, 0] > 0
    plain = np.flatnonzero(~shown)
    if background < len(plain):
        plain = rng.choice(plain, background, replace=False)
    return np.sort(np.concatenate([np.flatnonzero(shown), plain]))


class RowMaker:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tok = tokenizer

    def images(self, rng: np.random.Generator | None, scenes: list[Scene], background: int) -> tuple[Row, int]:
        """Returns the row up to its last image, and the next position. Without `rng`: the usual form, every patch."""
        row, at = Row(scenes), 1
        row.add([BOS], 0, 0)
        images = image_text(len(scenes))
        if rng is not None and rng.random() < (0.15 if len(scenes) == 1 else 0.35):
            # Also one numbered image, and several without numbers, as chat programs send them.
            images = f"Image 1: {MEDIA}" if len(scenes) == 1 else "\n".join([MEDIA] * len(scenes))
        texts = ("USER: " + images).split(MEDIA)
        for k, scene in enumerate(scenes):
            tokens = self.tok.encode(texts[k])
            row.add(tokens, at, 0)
            at += len(tokens)
            kept = np.arange(N_PATCHES) if rng is None else shown_patches(rng, scene, background)
            row.patches += [(k, int(p)) for p in kept]
            row.add([-1] * len(kept), at, 0)
            row.positions[-len(kept) :] = [at + int(p) for p in kept]
            at += N_PATCHES
        return row, at

    def ask(self, row: Row, at: int, branch: int, question: Question, style: Style) -> int:
        """Adds one question with its answer at position `at`. Returns the next position."""
        show = f"\n{show_text(len(row.scenes))}\nASSISTANT:"
        asked = f"{question.text}\nASSISTANT:" + (" " if style.spaced else "")
        if style.turn == 0:
            glue = "" if len(row.scenes) == 1 and style.rare else "\n"
            before = self.tok.encode(glue + asked)
        elif style.turn == 1:
            # The history as the model generated it, or as the template writes it (with a space before the answer).
            before = self.tok.encode(show + (" " if style.rare else ""))
            before += [*self.tok.encode(SHOW_ANSWER), EOS]
            before += self.tok.encode(f"\nUSER: {asked}")
        else:
            before = [EOS, *self.tok.encode(f"\nUSER: {asked}")]
        answer = [*self.tok.encode(question.answer), EOS]
        first = len(row.ids) + len(before) - 1
        row.add(before + answer[:-1], at, branch)
        if not style.spaced:
            row.targets[first : first + len(answer)] = answer
            for j, cells in enumerate(question.sources[: len(answer) - 1]):
                row.sources[first + j] = cells
        if style.turn == 1 and not style.rare:
            # The first turn's "ok" is learnt too; the role marker predicts its first token.
            start = len(row.ids) - len(answer) + 1 - len(before) + len(self.tok.encode(show)) - 1
            row.targets[start : start + 2] = [*self.tok.encode(SHOW_ANSWER), EOS]
        return at + len(before) + len(answer) - 1


def draw_questions(rng: np.random.Generator, scenes: list[Scene], amount: int) -> list[Question]:
    """Draws questions about these scenes, mostly with long answers or needles."""
    count = len(scenes)
    single = list(SINGLE_TASKS)
    weights = np.array([1.0, 1.0, 1.3, 1.3, 1.2, 1.0] if count == 1 else [0.4, 0.4, 0.4, 0.6, 3.0, 0.8, 3.0])
    names = single if count == 1 else [*single, "which-image"]
    questions: list[Question] = []
    described: set[int] = set()
    while len(questions) < amount:
        name = names[int(rng.choice(len(names), p=weights / weights.sum()))]
        k = int(rng.integers(0, count))
        if name == "describe" and (k in described or len(described) > 1):
            continue
        asker = SINGLE_TASKS.get(name) or NEEDLE_TASKS[name]
        question = asker(rng, scenes, k)
        if question is not None:
            questions.append(question)
            if name == "describe":
                described.add(k)
    return questions


def reworded(rng: np.random.Generator, question: Question) -> Question:
    """Sometimes changes the wording, so that the model does not depend on one wording."""
    if rng.random() > 0.15:
        return question
    text = question.text
    for usual, other in WORDINGS[int(rng.integers(0, len(WORDINGS)))]:
        text = text.replace(usual, other)
    return replace(question, text=text)


def draw_row(maker: RowMaker, rng: np.random.Generator, count: int, background: int, held_out: bool = False) -> Row:
    scenes = [draw_scene(rng, held_out) for _ in range(count)]
    extra: list[Question] = []
    changed = -1
    if count > 1 and rng.random() < 0.35:
        at = int(rng.integers(0, count - 1))
        scenes[at + 1], which = recolour(rng, scenes[at])
        extra = [ask_difference(scenes[at], scenes[at + 1], which, at)]
        changed = at
    questions = extra + draw_questions(rng, scenes, 8 - len(extra))
    row, at = maker.images(rng, scenes, background)
    row.changed_from = changed
    follows = [n > 0 and rng.random() < FOLLOWS for n in range(len(questions) + 1)]
    branch, place = 0, at
    for n, question in enumerate(questions):
        branch, place = (branch, place) if follows[n] else (branch + 1, at)
        turn = 2 if follows[n] else int(rng.random() < 0.3)
        rare = rng.random() < (0.5 if turn == 1 else 0.1)
        spaced = n + 1 < len(questions) and follows[n + 1] and rng.random() < 0.5
        place = maker.ask(row, place, branch, reworded(rng, question), Style(turn, rare, spaced))
    return row


@dataclass
class Batch:
    scenes: list[Scene]
    ids: Tensor  # [rows, tokens], -1 for patches
    positions: Tensor
    mask: Tensor  # additive, [rows, 1, tokens, tokens]
    targets: Tensor
    patch_at: Tensor  # [patches, 2]: row, token
    patch_of: Tensor  # [patches, 2]: scene, patch
    patch_image: Tensor  # [patches]: number of the image within its row
    patch_before: Tensor  # colour in the previous image, where two images are a pair, else IGNORE
    pairs: Tensor  # [pairs, 3]: row, token, and the token of the same cell in the previous image
    source_at: Tensor  # [supervised, 2]: row, token
    source_tokens: Tensor  # [supervised, MAX_SOURCES], -1: none
    source_labels: Tensor  # [supervised]: index into the patches of the first source


def collate(rows: list[Row], dtype: torch.dtype = torch.bfloat16) -> Batch:
    size = max(len(r.ids) for r in rows)

    def padded(name: str, fill: int) -> Tensor:
        return torch.tensor([getattr(r, name) + [fill] * (size - len(r.ids)) for r in rows])

    branch = padded("branch", -1)
    seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    seen &= torch.ones(size, size, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -1e4).unsqueeze(1)
    patch_at, patch_of, patch_image, before, pairs = [], [], [], [], []
    source_at, source_tokens, source_labels = [], [], []
    scene_base = 0
    for b, row in enumerate(rows):
        where: dict[tuple[int, int], tuple[int, int]] = {}
        image_tokens = (t for t, i in enumerate(row.ids) if i < 0)
        for t, (k, p) in zip(image_tokens, row.patches, strict=True):
            where[(k, p)] = (t, len(patch_at))
            patch_at.append((b, t))
            patch_of.append((scene_base + k, p))
            patch_image.append(k)
            before.append(IGNORE)
        if row.changed_from >= 0:
            for item in row.scenes[row.changed_from].items:
                cell = item.row * GRID + item.col
                t, n = where[(row.changed_from + 1, cell)]
                before[n] = 1 + COLOUR_NAMES.index(item.colour)
                pairs.append((b, t, where[(row.changed_from, cell)][0]))
        for t, cells in enumerate(row.sources):
            if cells:
                found = [where[(k, r * 12 + c)] for k, r, c in cells]
                source_at.append((b, t))
                source_tokens.append([f[0] for f in found] + [-1] * (MAX_SOURCES - len(found)))
                source_labels.append(found[0][1])
        scene_base += len(row.scenes)
    scenes = [s for r in rows for s in r.scenes]
    lists = (patch_at, patch_of, patch_image, before, pairs, source_at, source_tokens, source_labels)
    tensors = (torch.tensor(v) for v in lists)
    return Batch(scenes, padded("ids", 0), padded("positions", 0), mask, padded("targets", IGNORE), *tensors)
