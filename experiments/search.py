"""Compositions of stages are tried on few samples, the better ones on more: successive halving, for the best plan.

What a composition loses is the mean over tasks of log(1 + KL to the full cache), so that neither a task with long
answers nor one that is lost anyway decides; and a floor says how much of its worst task must be left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvedge_lab.eval.measure import Cell
from kvedge_lab.eval.records import Key
from kvedge_lab.eval.tasks import Sample
from pykvedge.errors import KvedgeError
from pykvedge.plans.making import plan

BASE = "knorm"  # a method without settings of its own; all its stages are replaced
Rows = Mapping[Key, Mapping[str, Any]]
Choices = Mapping[str, Sequence[Mapping[str, Any]]]  # member -> the settings that it is tried with


@dataclass(frozen=True)
class Space:
    """The product of these is searched, but for what the stages do not allow together.

    Of every stage: members, each with the settings that it is tried with ("scorer.window"). others: fields of plans.
    """

    scorers: Choices
    allocators: Choices
    reducers: Choices
    others: Sequence[Mapping[str, Any]] = ({},)

    def cells(self, budget: Any) -> Iterator[Cell]:
        """Makes a cell of every composition that there is, named after what is in it."""
        stages = (("scorer", self.scorers), ("allocator", self.allocators), ("reducer", self.reducers))
        lists = [[(stage, name, given) for name, of in choices.items() for given in of] for stage, choices in stages]
        for *members, others in product(*lists, self.others):
            settings: dict[str, Any] = dict(others)
            for stage, name, given in members:
                settings |= {stage: name, **given}
            try:
                yield Cell(_name(settings), plan(BASE, budget, **settings))
            except KvedgeError:
                continue  # stages that do not go together


def _name(settings: Mapping[str, Any]) -> str:
    members = "+".join(settings[stage] for stage in ("scorer", "allocator", "reducer"))
    rest = [f"{k}={v}" for k, v in sorted(settings.items()) if k not in ("scorer", "allocator", "reducer")]
    return " ".join([members, *rest])


@dataclass(frozen=True)
class Standing:
    """A cell on the samples of a round. loss: nats, by task, mean of log(1 + KL) over samples; agrees: by task, the
    share of answer tokens whose likeliest token is the full cache's.
    """

    cell: Cell
    loss: Mapping[str, float]
    agrees: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Returns the mean of the losses over tasks."""
        return sum(self.loss.values()) / len(self.loss)

    def order(self, floor: float) -> tuple[float, float, str]:
        """Sorts better ones first; those below the floor in a task come behind all others, by how far."""
        below = max(floor - min(self.agrees.values()), 0.0)
        return below, self.mean, self.cell.name


def standings(cells: Iterable[Cell], samples: Sequence[Sample], rows: Rows) -> list[Standing]:
    """Sums up what was measured of cells that were measured on all samples."""
    out = []
    for cell in cells:
        of = {sample: rows.get((sample.id, *cell.key)) for sample in samples}
        if all(of.values()):
            tasks: dict[str, list[Mapping[str, Any]]] = {}
            for sample, row in of.items():
                tasks.setdefault(sample.task, []).append(row)  # type: ignore[arg-type]
            loss = {task: sum(math.log1p(r["kld"] / r["tokens"]) for r in rs) / len(rs) for task, rs in tasks.items()}
            agrees = {task: sum(r["top1"] for r in rs) / sum(r["tokens"] for r in rs) for task, rs in tasks.items()}
            out.append(Standing(cell, loss, agrees))
    return out


def halving(
    cells: Sequence[Cell],
    rounds: Sequence[int],
    keep: float,
    floor: float,
    measure: Callable[[int, Sequence[Cell]], list[Standing]],
) -> list[Standing]:
    """Returns the standings after the last round, the best first.

    rounds: samples of each task in every round, growing. keep: the share of cells that goes on after a round.
    measure(samples, cells): the standings of the cells that could be measured.
    """
    left, found = list(cells), []
    for number, count in enumerate(rounds):
        found = sorted(measure(count, left), key=lambda one: one.order(floor))
        if number < len(rounds) - 1:
            left = [one.cell for one in found[: max(math.ceil(keep * len(found)), 1)]]
    return found
