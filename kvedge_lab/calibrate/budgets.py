"""Measures what a KV head's kept share costs the answers, head by head, and exchanges shares between heads.

One head keeps less or more while the other heads keep a baseline. The loss is the mean KL divergence of the next
token's distribution from the full cache's, in nats, over the tokens of an answer. A prompt is read once and copies of
it are compressed. The answer is fed in one pass, because nothing is dropped while it is read.

One head at a time hardly misses what all heads together miss. Around a profile, the other heads keep the profile's
shares, and the result counts half, so shares that were exchanged together do not swing back together.

The question is inside the compressed prompt, or later. If it is later, the compressed part ends before the question,
and the first word of the answer counts too.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvedge_lab.calibrate.exchange import FLOOR, exchange
from kvedge_lab.calibrate.heads import LONGEST_ANSWER
from kvedge_lab.calibrate.samples import Labelled
from kvedge_lab.eval import metrics
from kvedge_lab.eval.files import read_text
from kvedge_lab.eval.measure import CONTEXT, CONVERSATION, Preparer
from kvedge_lab.eval.reader import BRANCH, PROMPT, Reader
from kvedge_lab.jsonlines import Results
from pykvedge.errors import KvedgeError, NothingToCompressError, ProfileError, UsageError
from pykvedge.models.profiles import hash_of
from pykvedge.models.vision import ImagePiece, Piece
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.plan import Plan
from pykvedge.reference.stages.base import ProfileTable
from pykvedge.runtime.interrupt import stop_if_set

SMALLEST = 1 / 128  # the first point, as a share of the prompt
MAX_POINTS = 1000
METHOD = "snapkv"  # this method protects nothing and merges nothing
SAME = 1e-6  # nats: a smaller difference is rounding
MOST = 1e9  # nats: a larger loss was not measured
Place = tuple[int, int]  # (layer of the model, KV head)
Step = Callable[[str, int], None]  # (text about the current work, number of measurements done since the last call)
OnEstimate = Callable[[int, float], Step]  # (number of measurements, expected seconds)


def _table(places: Sequence[Place], n_layers: int, values: np.ndarray) -> np.ndarray:
    """Returns a table [layers of the model, Hkv] with a value for each head in `places`; 0 elsewhere."""
    out = np.zeros((n_layers, 1 + max(head for _, head in places)))
    out[tuple(np.array(places).T)] = values
    return out


@dataclass(frozen=True)
class Setup:
    """What is measured. The other heads keep the plan's budget (a share of the prompt), or the shares of `around`."""

    plan: Plan  # scorer, protection and reducer of the measurement
    points: tuple[float, ...]  # kept shares of the prompt, ascending
    targets: tuple[float, ...]  # budgets for the exchange
    floor: float = FLOOR
    around: np.ndarray | None = None  # shares of all pairs [layers of the model, Hkv] of the other heads
    ways: tuple[str, ...] = (CONVERSATION,)  # what is compressed: CONVERSATION, CONTEXT, or both in turn

    def header(
        self, model: Path, data: Path | str, samples: Iterable[Labelled] = (), mmproj: Path | None = None
    ) -> dict[str, Any]:
        """Returns what must be equal in two runs with losses in one file. Raises ModelError, UsageError.

        data: a file of samples, or the name of drawn scenes. samples: of the file; their pictures must be equal, too.
        """
        if isinstance(data, Path):
            content = hashlib.sha256(read_text(data).encode())
            for picture in (picture for sample in samples for picture in sample.pictures):
                content.update(picture.key.encode())
            data = f"{data.name} {content.hexdigest()[:16]}"
        baseline = self.plan.budget.value
        out = {"model": hash_of(model), "data": data, "scorer": self.plan.scorer, "baseline": baseline,
               "points": list(self.points)}  # fmt: skip
        if mmproj is not None:
            out["mmproj"] = hash_of(mmproj)
        if self.plan.method != METHOD:
            out["method"] = self.plan.method
        usual = make_plan(self.plan.method, baseline, allocator="uniform", scorer=self.plan.scorer)
        if self.plan.params != usual.params:
            out["settings"] = dict(self.plan.params)
        if self.ways != (CONVERSATION,):
            out["compress"] = list(self.ways)
        return out if self.around is None else {**out, "around": self.around.tolist()}

    def readings(self, samples: Iterable[Labelled]) -> Iterator[tuple[Labelled, str]]:
        """Yields samples and ways of compression, except ways in which nothing comes before the question."""
        for sample in samples:
            early = bool(sample.pictures or sample.earlier)
            yield from ((sample, way) for way in self.ways if way == CONVERSATION or early)

    def others(self, places: Sequence[Place], n_layers: int) -> np.ndarray:
        """Returns the shares of the prompt [heads] of heads that are not measured: on average the baseline, at most 1.

        Raises ProfileError if the profile has other heads or another number of layers.
        """
        if self.around is None:
            return np.full(len(places), float(self.plan.budget.value))
        if not np.array_equal(self.around != 0, _table(places, n_layers, np.ones(len(places)))):
            raise ProfileError("the profile of --around does not fit the heads of this model; omit --around")
        shares = self.around[tuple(np.array(places).T)]
        return np.minimum(shares / shares.mean() * float(self.plan.budget.value), 1.0)


class CurveFile(Results):
    """The losses so far, by sample and head, in a file of JSON lines, so a long run can be continued.

    The first line says what is measured. A line follows for each head of a sample. A line with the loss of the baseline
    ends a sample.
    """

    KIND, WHAT = "kvedge_curves", "losses of kvedge calibrate budgets"

    def __init__(self, path: Path | None, header: Mapping[str, Any], n_points: int, resume: bool = False) -> None:
        """Raises what Results raises."""
        self.heads: dict[int, dict[Place, list[float]]] = {}
        self.baselines: dict[int, float] = {}
        self._n_points = n_points
        super().__init__(path, header, resume)

    def add(self, sample: int, place: Place, losses: list[float]) -> None:
        """Stores the losses of a head, one per point. Raises SaveError."""
        self._file.add({"sample": sample, "layer": place[0], "head": place[1], "losses": losses})
        self.heads.setdefault(sample, {})[place] = losses

    def end(self, sample: int, baseline: float) -> None:
        """Stores the loss of the baseline; the sample is complete then. Raises SaveError."""
        self._file.add({"sample": sample, "baseline": baseline})
        self.sync()
        self.baselines[sample] = baseline

    def _take(self, row: dict[str, Any]) -> None:
        numbers = np.array(row["losses"] if "losses" in row else [row["baseline"]], dtype=np.float64)
        right = numbers.shape == (self._n_points if "losses" in row else 1,)
        if not right or not ((numbers >= 0) & (numbers < MOST)).all():
            raise ValueError(row)
        sample, *place = (row[name] for name in ("sample", "layer", "head")[: 3 if "losses" in row else 1])
        if not all(type(number) is int and number >= 0 for number in (sample, *place)):
            raise ValueError(row)
        if place:
            self.heads.setdefault(sample, {})[place[0], place[1]] = numbers.tolist()
        else:
            self.baselines[sample] = float(numbers[0])

    def places(self, n_samples: int, n_layers: int) -> list[Place]:
        """Returns the heads of all samples, in order. Raises UsageError if they differ, or if a layer is not there."""
        places = sorted(self.heads.get(0, {}))
        if any(layer >= n_layers for layer, _ in places) or any(
            sorted(self.heads.get(number, {})) != places for number in range(n_samples)
        ):
            raise UsageError(
                "the file of losses has other heads than the model, or not all heads of a sample; save to another file"
            )
        return places


@dataclass
class Curves:
    """The losses [heads, points] in nats, averaged over samples, and the places of the heads in the model."""

    losses: np.ndarray
    places: list[Place]
    samples: int
    baseline: float  # loss with all heads at the baseline

    def shares(self, setup: Setup, n_layers: int) -> np.ndarray:
        """Returns shares of all pairs, [layers of the model, Hkv] with sum 1; 0 for layers that kvedge does not store.

        Around a profile, the result is the mean of the profile's shares and the found shares. Raises KvedgeError if no
        head's share changes anything.
        """
        if np.ptp(self.losses, axis=1).max() < SAME:
            raise KvedgeError(
                "the budgets of heads do not change the answers: the prompts are too short, or the answers do not "
                "depend on them; give other samples with --data"
            )
        out = _table(self.places, n_layers, exchange(np.array(setup.points), self.losses, setup.targets, setup.floor))
        return out if setup.around is None else (out + setup.around) / 2


def setup_for(
    scorer: str | None,
    baseline: float,
    n_points: int,
    targets: Sequence[float],
    method: str = METHOD,
    ways: Sequence[str] = (CONVERSATION,),
    settings: Mapping[str, Any] | None = None,
) -> Setup:
    """Makes the setup from the options of `kvedge calibrate budgets`. Raises UsageError, UnknownNameError.

    scorer: None: the method's scorer. The measurement uses the method's reducer, protection and pruner, but not its
    allocator. settings: settings of stages by full name that differ from the method's.
    """
    if not 0 < baseline < 1:
        raise UsageError(f"--baseline must be a share of the prompt above 0 and below 1, not {baseline:g}")
    if not 2 <= n_points <= MAX_POINTS:
        raise UsageError(f"--points must be 2 to {MAX_POINTS}, not {n_points}")
    if not ways or not set(ways) <= {CONVERSATION, CONTEXT} or len(set(ways)) < len(ways):
        raise UsageError(
            f"--compress must be {CONVERSATION}, {CONTEXT}, or both separated by a comma, not {','.join(ways)!r}"
        )
    points = tuple(np.geomspace(SMALLEST, 1.0, n_points).tolist())
    own = {**({} if scorer is None else {"scorer": scorer}), **(settings or {})}
    plan = make_plan(method, float(baseline), allocator="uniform", **own)
    return Setup(plan, points, tuple(targets), ways=tuple(ways))


class _Curver:
    """Measures readings one by one, and adds the losses to `kept`."""

    def __init__(
        self, reader: Reader, setup: Setup, kept: CurveFile, on_estimate: OnEstimate, count: int,
        cancel: threading.Event | None,
    ) -> None:  # fmt: skip
        """count: number of all readings. on_estimate: see measure_curves."""
        self._reader, self._setup, self._kept, self._cancel = reader, setup, kept, cancel
        self._on_estimate = on_estimate
        own = {**setup.plan.params, "allocator.share_of": "prompt"}
        self._counted = setup.plan.with_(allocator="calibrated", params=own)
        self._places: list[Place] = []
        self._count, self._before = count, sum(map(len, kept.heads.values()))  # before: number of heads in the file
        self._begun, self._steps = time.monotonic(), 0
        self._step: Step | None = None

    def measure(self, number: int, sample: Labelled, way: str) -> None:
        """Measures the losses of a reading that `kept` lacks. Raises what Reader raises, and SaveError."""
        model, vision = self._reader.model, self._reader.vision
        if number in self._kept.baselines:
            return
        if sample.pictures and vision is None:
            name = model.path.name
            raise UsageError(f"a sample has images, but {name} was loaded without an image encoder; pass --mmproj")
        preparer = Preparer(model, vision, lambda _: stop_if_set(self._cancel), way)
        turns, answer, question = preparer.tokens(sample.messages(), sample.answer)
        try:
            [(pieces, _)] = turns
            answer = answer if sample.answer else []
            self._read(pieces, question, len(answer) or LONGEST_ANSWER)
            answer = answer or self._answer(question)
            if not answer:
                raise UsageError(
                    f'the model gives an empty answer to {sample.question!r:.60}; add an "answer" to the sample'
                )
            self._heads(number, question, answer)
        finally:
            preparer.release(turns)

    def _read(self, pieces: list[Piece], question: list[Piece], n_answer: int) -> None:
        largest = max((piece.n_tokens for piece in pieces if isinstance(piece, ImagePiece)), default=0)
        reader = self._reader
        reader.make_room(sum(piece.n_tokens for piece in (*pieces, *question)), n_answer, largest)
        reader.start(self._setup.plan)
        reader.read(pieces)
        self._places = self._places or reader.heads()
        if not self._places:
            raise NothingToCompressError(
                f"{reader.model.path.name} has no layers that kvedge can compress; use another model"
            )

    def _ask(self, question: list[Piece]) -> bool:
        """Reads a separate question and keeps all of it. Returns whether there is a separate question."""
        if question:
            self._reader.read(question)
            self._reader.keep(self._setup.plan)
        return bool(question)

    def _answer(self, question: list[Piece]) -> list[int]:
        """Returns the model's greedy answer with the full cache."""
        reader, out = self._reader, list[int]()
        reader.copy(BRANCH)
        self._ask(question)
        while len(out) < LONGEST_ANSWER and not reader.model.is_end(best := int(reader.logits().argmax())):
            stop_if_set(self._cancel)
            out.append(best)
            reader.extend(best)
        reader.back_to(PROMPT)
        return out

    def _heads(self, number: int, question: list[Piece], answer: list[int]) -> None:
        """question: read after the compression and before the answer, if the question comes later."""
        self._reader.copy(BRANCH)
        full = [metrics.log_softmax(row).astype(np.float32) for row in self._rows(question, answer)]
        self._reader.back_to(PROMPT)
        others = self._setup.others(self._places, self._reader.model.n_layer)

        def loss(shares: np.ndarray) -> float:
            """Returns the mean divergence from the full cache with these kept shares [heads] of the compressed part."""
            self._compress(shares)
            rows = map(metrics.log_softmax, self._rows(question, answer))
            each = [metrics.divergence(p.astype(np.float64), row) for p, row in zip(full, rows, strict=True)]
            self._reader.back_to(PROMPT)
            return float(np.maximum(each, 0.0).mean())

        for i, place in enumerate(self._places):
            if place in self._kept.heads.get(number, {}):
                continue
            losses = []
            for share in self._setup.points:
                stop_if_set(self._cancel)
                shares = others.copy()
                shares[i] = share
                losses.append(loss(shares))
                self._tell(f"layer {place[0]}, head {place[1]}")
            self._kept.add(number, place, losses)
        self._kept.end(number, loss(others))

    def _rows(self, question: list[Piece], answer: list[int]) -> Iterator[np.ndarray]:
        """Reads a separate question, and the answer. Yields logits [n_vocab] after the question and each token."""
        if self._ask(question):
            yield self._reader.logits()
        yield from self._reader.feed(answer)

    def _compress(self, shares: np.ndarray) -> None:
        table = _table(self._places, self._reader.model.n_layer, shares).astype(np.float32)
        self._reader.copy(BRANCH)
        self._reader.set_plan(self._counted, {"allocator": ProfileTable(table, np.zeros(0, dtype=np.float32))})
        self._reader.compress()

    def _tell(self, what: str) -> None:
        """Reports a measurement. The first head's are reported together, with an estimate for all heads."""
        self._steps += 1
        points = len(self._setup.points)
        if self._step is not None:
            self._step(what, 1)
        elif self._steps >= points:
            runs = (len(self._places) * self._count - self._before) * points
            self._step = self._on_estimate(runs, runs * (time.monotonic() - self._begun) / self._steps)
            self._step(what, self._steps)


def measure_curves(
    reader: Reader,
    setup: Setup,
    samples: Iterable[Labelled],
    count: int,
    kept: CurveFile,
    on_estimate: OnEstimate,
    cancel: threading.Event | None = None,
) -> Curves:
    """Measures the losses that `kept` lacks for `count` samples of equal weight.

    reader: with several outputs per pass. on_estimate(number of measurements, expected seconds) is called after the
    first head; it returns the function that is called for each measurement. Raises CancelledError, SaveError,
    UsageError, and what Reader raises.
    """
    used = done = 0

    def drawn() -> Iterator[Labelled]:
        nonlocal used
        for sample in itertools.islice(samples, count):
            stop_if_set(cancel)
            used += 1
            yield sample

    own = samples[:count] if isinstance(samples, list) else None  # drawn samples have images, so no way is left out
    n_readings = count * len(setup.ways) if own is None else sum(1 for _ in setup.readings(own))
    curver = _Curver(reader, setup, kept, on_estimate, n_readings, cancel)
    for done, (sample, way) in enumerate(setup.readings(drawn()), 1):
        curver.measure(done - 1, sample, way)
    if not done:
        raise UsageError("no sample can be measured; --compress context needs samples with images or earlier questions")
    places, numbers = kept.places(done, reader.model.n_layer), range(done)
    losses = np.array([[kept.heads[number][place] for place in places] for number in numbers])
    return Curves(losses.mean(axis=0), places, used, float(np.mean([kept.baselines[n] for n in numbers])))
