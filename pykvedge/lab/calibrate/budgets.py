"""What a KV head's kept share costs the answers is measured head by head, and shares are exchanged by it.

While the other heads keep a baseline, one head keeps less or more; the loss is the mean KL divergence of the next
token's distribution from that of the full cache, in nats, over the tokens of an answer that is fed. A prompt is read
once: what is compressed are copies of it, and an answer is fed in one pass, since nothing is dropped while it is read.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pykvedge.errors import KvedgeError, NothingToCompressError, UsageError
from pykvedge.lab.calibrate.curvefile import CurveFile, Place
from pykvedge.lab.calibrate.exchange import FLOOR, exchange
from pykvedge.lab.calibrate.heads import LONGEST_ANSWER
from pykvedge.lab.calibrate.samples import Labelled
from pykvedge.lab.eval import metrics
from pykvedge.lab.eval.files import read_text
from pykvedge.lab.eval.reader import BRANCH, PROMPT, Reader
from pykvedge.models.composer import Composer
from pykvedge.models.model import Model
from pykvedge.models.profiles import hash_of
from pykvedge.models.prompt import Message
from pykvedge.models.vision import ImagePiece, Piece, Vision
from pykvedge.plans.plan import Plan
from pykvedge.plans.presets import plan as make_plan
from pykvedge.plans.stages.base import ProfileTable
from pykvedge.runtime.interrupt import stop_if_set

SMALLEST = 1 / 128  # of the prompt: the first point
MOST_POINTS = 1000
SAME = 1e-6  # nats: less is rounding
Step = Callable[[str, int], None]  # what is under way, and how many more measurements are done


@dataclass(frozen=True)
class Setup:
    """This is measured. baseline: share of the prompt that the other heads keep. targets: budgets to exchange for."""

    plan: Plan  # its scorer, protection and reducer
    points: tuple[float, ...]  # kept shares of the prompt, ascending
    targets: tuple[float, ...]
    floor: float = FLOOR

    def header(self, model: Path, data: Path | str) -> dict[str, Any]:
        """Returns what must be equal in two runs whose losses may lie in one file. Raises ModelError, UsageError.

        data: a file of samples, or which scenes are drawn.
        """
        if isinstance(data, Path):
            data = f"{data.name} {hashlib.sha256(read_text(data).encode()).hexdigest()[:16]}"
        baseline = self.plan.budget.value
        return {"model": hash_of(model), "data": data, "scorer": self.plan.scorer, "baseline": baseline,
                "points": list(self.points)}  # fmt: skip


@dataclass
class Curves:
    """These are the losses [heads, points] in nats, mean of the samples, and where the heads are in the model."""

    losses: np.ndarray
    places: list[Place]
    samples: int
    baseline: float  # loss with every head at the baseline

    def shares(self, setup: Setup, n_layers: int) -> np.ndarray:
        """Shares of all pairs, [layers of the model, Hkv] of sum 1; 0 for layers that kvedge does not store.

        Raises KvedgeError where no head's share changes anything.
        """
        if np.ptp(self.losses, axis=1).max() < SAME:
            raise KvedgeError(
                "the answers are the same whatever a head keeps: the prompts are too short, or the answers need "
                "nothing of them; give others with --data"
            )
        found = exchange(np.array(setup.points), self.losses, setup.targets, setup.floor)
        out = np.zeros((n_layers, 1 + max(head for _, head in self.places)))
        out[tuple(np.array(self.places).T)] = found
        return out


def setup_for(scorer: str, baseline: float, n_points: int, targets: Sequence[float], floor: float = FLOOR) -> Setup:
    """Makes the setup of the options of `kvedge calibrate budgets`. Raises UsageError, UnknownNameError."""
    if not 0 < baseline < 1:
        raise UsageError(f"--baseline must be a share of the prompt above 0 and below 1, not {baseline:g}")
    if not 2 <= n_points <= MOST_POINTS:
        raise UsageError(f"--points must be 2 to {MOST_POINTS}, not {n_points}")
    points = tuple(np.geomspace(SMALLEST, 1.0, n_points).tolist())
    return Setup(make_plan("snapkv", float(baseline), scorer=scorer), points, tuple(targets), floor)


class Curver:
    """A Curver measures one sample after another with a context of its own. Close it when done."""

    def __init__(self, model: Model, vision: Vision | None, reader: Reader, setup: Setup) -> None:
        """reader: of the model, with room for several outputs a pass. Errors are those of Composer."""
        self._model, self._vision, self._reader, self._setup = model, vision, reader, setup
        self._composer = Composer(model, vision)
        self._counted = setup.plan.with_(
            allocator="calibrated", params={**setup.plan.params, "allocator.share_of": "prompt"}
        )
        self.places: list[Place] = []

    def measure(
        self, number: int, sample: Labelled, kept: CurveFile, step: Step, cancel: threading.Event | None = None
    ) -> None:
        """Measures what `kept` lacks of one sample, and adds it. Raises what Reader raises, and SaveError."""
        if number in kept.baselines:
            return
        if sample.pictures and self._vision is None:
            name = self._model.path.name
            raise UsageError(f"a sample has images, and {name} was loaded without an image encoder; see --mmproj")
        message = Message("user", sample.question, list(sample.pictures))
        written = self._composer.first([message])
        pieces = self._composer.pieces(written, message.pictures)
        answer = self._composer.reply(written, sample.answer) if sample.answer else []
        try:
            self._read(pieces, len(answer) or LONGEST_ANSWER, cancel)
            answer = answer or self._answer(cancel)
            if not answer:
                raise UsageError(f'the model says nothing to {sample.question!r:.60}; give it an "answer"')
            self._measure(number, answer, kept, step, cancel)
        finally:
            if self._vision is not None:
                self._vision.release(pieces)
                self._vision.forget()

    @property
    def n_points(self) -> int:
        return len(self._setup.points)

    def _read(self, pieces: list[Piece], n_answer: int, cancel: threading.Event | None) -> None:
        images = [piece for piece in pieces if isinstance(piece, ImagePiece)]
        for piece in images:
            if self._vision is not None:
                self._vision.encode(piece, lambda _: stop_if_set(cancel))
        reader, largest = self._reader, max((piece.n_tokens for piece in images), default=0)
        reader.make_room(sum(piece.n_tokens for piece in pieces), n_answer, largest)
        reader.start(self._setup.plan)
        reader.read(pieces)
        if not self.places:
            self.places = reader.heads()
        if not self.places:
            raise NothingToCompressError(f"{self._model.path.name} has no layers that kvedge can compress")

    def _answer(self, cancel: threading.Event | None) -> list[int]:
        """The model's own answer with the full cache, greedy."""
        reader, out = self._reader, list[int]()
        reader.copy(BRANCH)
        while len(out) < LONGEST_ANSWER and not self._model.is_end(best := int(reader.logits().argmax())):
            stop_if_set(cancel)
            out.append(best)
            reader.extend(best)
        reader.back_to(PROMPT)
        return out

    def _measure(
        self, number: int, answer: list[int], kept: CurveFile, step: Step, cancel: threading.Event | None
    ) -> None:
        reader = self._reader
        reader.copy(BRANCH)
        full = [metrics.log_softmax(row).astype(np.float32) for row in reader.feed(answer)]
        reader.back_to(PROMPT)
        even = np.full(len(self.places), float(self._setup.plan.budget.value))
        for i, (layer, head) in enumerate(self.places):
            if (layer, head) in kept.heads.get(number, {}):
                continue
            losses = []
            for share in self._setup.points:
                stop_if_set(cancel)
                shares = even.copy()
                shares[i] = share
                losses.append(self._loss(shares, answer, full))
                step(f"layer {layer}, head {head}", 1)
            kept.add(number, (layer, head), losses)
        kept.end(number, self._loss(even, answer, full))

    def _loss(self, shares: np.ndarray, answer: list[int], full: list[np.ndarray]) -> float:
        """Mean divergence from the full cache, where heads keep these shares [heads] of the prompt.

        full: log-probabilities [n_vocab] after each token of the answer.
        """
        table = np.zeros((self._model.n_layer, 1 + max(head for _, head in self.places)), dtype=np.float32)
        table[tuple(np.array(self.places).T)] = shares
        reader = self._reader
        reader.copy(BRANCH)
        reader.set_plan(self._counted, {"allocator": ProfileTable(table, np.zeros(0, dtype=np.float32))})
        reader.compress()
        each = [
            max(metrics.divergence(p.astype(np.float64), metrics.log_softmax(row)), 0.0)
            for p, row in zip(full, reader.feed(answer), strict=True)
        ]
        reader.back_to(PROMPT)
        return float(np.mean(each))


def measure_curves(
    curver: Curver,
    samples: Iterable[Labelled],
    count: int,
    kept: CurveFile,
    told: Callable[[int, float], Step],
    cancel: threading.Event | None = None,
) -> Curves:
    """Measures what `kept` lacks of `count` samples, each of which counts the same.

    told(measurements to make, seconds that they are expected to take) is called when those of a head are done, and
    returns what is told of each from then on. Raises CancelledError, SaveError, and what Curver.measure raises.
    """
    tell = _Estimate(curver, count, kept, told)
    numbers = range(0)
    for number, sample in enumerate(itertools.islice(samples, count)):
        curver.measure(number, sample, kept, tell.step, cancel)
        numbers = range(number + 1)
    if not numbers:
        raise UsageError("there are no samples to measure")
    places = sorted(kept.heads[0])
    losses = np.array([[kept.heads[number][place] for place in places] for number in numbers])
    return Curves(losses.mean(axis=0), places, len(numbers), float(np.mean([kept.baselines[n] for n in numbers])))


class _Estimate:
    """Waits for the first head's measurements before it tells of any, so that it can say how long all of them take."""

    def __init__(self, curver: Curver, count: int, kept: CurveFile, told: Callable[[int, float], Step]) -> None:
        self._curver, self._count, self._told = curver, count, told
        self._before = sum(map(len, kept.heads.values()))  # heads that are measured already
        self._begun, self._steps = time.monotonic(), 0
        self._tell: Step | None = None

    def step(self, what: str, n: int) -> None:
        self._steps += n
        if self._tell is not None:
            self._tell(what, n)
        elif self._steps >= self._curver.n_points:
            heads = len(self._curver.places) * self._count - self._before
            each = (time.monotonic() - self._begun) / self._steps
            self._tell = self._told(heads * self._curver.n_points, heads * self._curver.n_points * each)
            self._tell(what, self._steps)
