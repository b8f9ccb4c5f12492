"""Successive halving: measures compositions of stages on few samples, and the better ones on more samples.

The loss of a composition is the mean over tasks of log(1 + KL to the full cache), so that no task dominates: neither a
task with long answers nor a task that every composition fails. A floor sets the least agreement in the worst task.
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

BASE = "knorm"  # a method without settings; all its stages are replaced
Rows = Mapping[Key, Mapping[str, Any]]
Choices = Mapping[str, Sequence[Mapping[str, Any]]]  # member -> the settings to try


@dataclass(frozen=True)
class Space:
    """The search space: the product of the members of every stage, except combinations that the stages forbid.

    Each member has a list of settings to try ("scorer.window"). others: fields of plans.
    """

    scorers: Choices
    allocators: Choices
    reducers: Choices
    others: Sequence[Mapping[str, Any]] = ({},)

    def cells(self, budget: Any) -> Iterator[Cell]:
        """Yields a cell for every valid composition. The name of a cell lists its settings."""
        stages = (("scorer", self.scorers), ("allocator", self.allocators), ("reducer", self.reducers))
        lists = [[(stage, name, given) for name, of in choices.items() for given in of] for stage, choices in stages]
        for *members, others in product(*lists, self.others):
            settings: dict[str, Any] = dict(others)
            for stage, name, given in members:
                settings |= {stage: name, **given}
            try:
                yield Cell(_name(settings), plan(BASE, budget, **settings))
            except KvedgeError:
                continue  # an invalid combination of stages


def _name(settings: Mapping[str, Any]) -> str:
    members = "+".join(settings[stage] for stage in ("scorer", "allocator", "reducer"))
    rest = [f"{k}={v}" for k, v in sorted(settings.items()) if k not in ("scorer", "allocator", "reducer")]
    return " ".join([members, *rest])


@dataclass(frozen=True)
class Standing:
    """The results of a cell in a round. loss: nats, by task, mean of log(1 + KL) over samples; agrees: by task, the
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
        """Returns a sort key: better first. A cell below the floor in a task sorts after all others, by distance."""
        below = max(floor - min(self.agrees.values()), 0.0)
        return below, self.mean, self.cell.name


def standings(cells: Iterable[Cell], samples: Sequence[Sample], rows: Rows) -> list[Standing]:
    """Returns the standings of the cells that were measured on all samples."""
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

    rounds: samples of each task in every round, growing. keep: the share of cells that stays after a round.
    measure(samples, cells): returns the standings of the cells that could be measured.
    """
    left, found = list(cells), []
    for number, count in enumerate(rounds):
        found = sorted(measure(count, left), key=lambda one: one.order(floor))
        if number < len(rounds) - 1:
            left = [one.cell for one in found[: max(math.ceil(keep * len(found)), 1)]]
    return found
