"""Measures all methods on each sample in turn, so finished results always compare the same samples."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from kvedge_lab.eval.measure import CONTEXT, CONVERSATION, PROMPT, Cell, MeasureOptions, Measurer, Preparer
from kvedge_lab.eval.reader import reading
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.tasks import Sample
from kvedge_lab.jsonlines import SaveError
from kvedge_lab.progress import Steps
from pykvedge.errors import ContextError, ImageError, KvedgeError, UsageError
from pykvedge.models.profiles import hash_of
from pykvedge.models.prompt import IMAGE, PLACE
from pykvedge.plans.making import plan
from pykvedge.runtime.interrupt import CancelledError, stop_if_set
from pykvedge.runtime.loaded import borrow
from pykvedge.runtime.settings import Settings

FULL = "full"
Todo = tuple[Sample, set[tuple[str, str]]]  # a sample, and the keys of the cells that it lacks


@dataclass
class Outcome:
    """The result of a run. left_out: lines that say what is missing and why."""

    records: Records
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True)
class Job:
    """What to measure with which model. cells: the full cache is added as the first cell."""

    model: Path
    mmproj: Path | None
    samples: list[Sample]
    cells: list[Cell]
    options: MeasureOptions = field(default_factory=MeasureOptions)
    settings: Settings = field(default_factory=Settings)

    def header(self) -> dict[str, Any]:
        """Returns what must be equal in two runs with results in one file.

        as_one: marks files of this version; earlier versions compressed contexts message by message.
        """
        return {
            "model": hash_of(self.model),
            "mmproj": hash_of(self.mmproj) if self.mmproj else None,
            "kv_type": self.settings.storage.key,
            "answers": self.options.answers,
            "likelihood": self.options.likelihood,
            "max_tokens": self.options.max_tokens,
            **({"compress": self.options.compress, "as_one": True} if self.options.compress != PROMPT else {}),
            **({"keep": self.settings.keep} if self.settings.keep else {}),
        }


def full_cell() -> Cell:
    return Cell(FULL, plan(FULL))


def evaluate(
    job: Job, records: Records, display: Steps | None = None, cancel: threading.Event | None = None
) -> Outcome:
    """Measures what `records` lacks, and adds it.

    Setting `cancel` ends the run after the current work; records stay. Raises ModelError, LibraryError, UsageError (a
    sample with the same name but other content was measured before). Unreadable or too long samples, and methods that
    fail, are left out and listed in the outcome.
    """
    out, cancel = Outcome(records), cancel or threading.Event()
    full = full_cell()
    cells = [cell for cell in job.cells if cell.name != FULL]
    todo = [(sample, lacking(sample, full, cells, records)) for sample in job.samples]
    todo = [(sample, missing) for sample, missing in todo if missing]
    display = display or Steps(enabled=False)
    if not todo:
        return out
    try:
        with display, ExitStack() as held:
            loan = borrow(job.model, job.mmproj, job.settings, display, cancel)
            held.callback(loan.give_back)
            reader = held.enter_context(reading(loan, job.settings, cancel))
            preparer = Preparer(reader.model, reader.vision, partial(stop_if_set, cancel), job.options.compress)
            run = Run(out, full, cells, display, cancel, preparer, Measurer(reader, job.options))
            for group in _together(todo, job.options.compress):
                run.one(group)
    except CancelledError:
        out.interrupted = True
    return out


def _together(todo: list[Todo], compress: str) -> list[list[Todo]]:
    """Groups consecutive questions about one context, so the part before them is read once.

    Text before the last image belongs to that part too.
    """

    def context(one: Todo) -> tuple[str, str]:
        sample, _ = one
        as_one = compress == CONVERSATION or len(sample.lines) == 1
        shared = compress == CONTEXT or (as_one and any(line.images for line in sample.lines))
        text = sample.lines[-1].text
        ends = [found.end() for found in PLACE.finditer(text) if found[0] == IMAGE]
        return (sample.context if shared else "") or sample.id, text[: max(ends, default=0)]

    return [list(found) for _, found in groupby(todo, key=context)]


def lacking(sample: Sample, full: Cell, cells: list[Cell], records: Records) -> set[tuple[str, str]]:
    missing = set()
    for cell in (full, *cells):
        row = records.rows.get((sample.id, cell.name, str(cell.budget)))
        if row is None:
            missing.add(cell.key)
        elif row["digest"] != sample.digest():
            raise UsageError(
                f"sample {sample.id} differs from the sample of this name in the file; give --save another file"
            )
        elif row["plan"] != cell.digest:
            what = f"the plan or profile of {cell.name} at {cell.plan.budget} differs from the file"
            raise UsageError(f"{what}; give --save another file")
    return missing


@dataclass
class Run:
    """Measures one context after another, and leaves out cells that fail."""

    out: Outcome
    full: Cell
    cells: list[Cell]
    display: Steps
    cancel: threading.Event
    preparer: Preparer
    measurer: Measurer

    def one(self, group: list[Todo]) -> None:
        """Measures samples of one context by the cells that they lack. Raises CancelledError, SaveError."""
        stop_if_set(self.cancel)
        missing = {sample.id: lacks for sample, lacks in group}
        samples, steps = [sample for sample, _ in group], sum(len(lacks) for _, lacks in group)
        cells = [cell for cell in self.cells if any(cell.key in lacks for _, lacks in group)]
        self.display.step(samples[0].task, 0)
        try:
            asked = self.preparer.prepare_all(samples)
        except (ImageError, ContextError) as error:
            self._skip(samples, error, steps)
            return
        try:
            for sample, cell, record in self.measurer.measure(asked, self.full, cells, self._fail):
                if cell.key in missing[sample.id]:
                    self.out.records.add(_record(sample, cell, record))
                    self.display.step(f"{sample.task}, {cell.name} {cell.plan.budget}")
        except ContextError as error:
            self._skip(samples, error, steps)
        finally:
            self.preparer.release(asked[0].turns)
        self.out.records.sync()

    def _skip(self, samples: list[Sample], error: KvedgeError, steps: int) -> None:
        for sample in samples:
            self._say(f"{sample.id} left out: {error}")
        self.display.skip(steps)

    def _fail(self, cell: Cell, error: KvedgeError) -> None:
        if isinstance(error, (CancelledError, SaveError)):
            raise error
        if cell in self.cells:
            self.cells.remove(cell)
            self._say(f"{cell.name} at {cell.plan.budget} left out: {error}")

    def _say(self, text: str) -> None:
        self.out.left_out.append(text)
        self.display.say(f"kvedge: {text}")


def _record(sample: Sample, cell: Cell, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": sample.id,
        "digest": sample.digest(),
        "task": sample.task,
        "groups": list(sample.groups),
        "metric": sample.metric,
        "method": cell.name,
        "budget": cell.budget,
        "plan": cell.digest,
        "reference": sample.answer,
        **figures,
    }


def steps(job: Job, records: Records) -> int:
    """Returns the number of records that a run will add."""
    cells = [cell for cell in job.cells if cell.name != FULL]
    return sum(len(lacking(sample, full_cell(), cells, records)) for sample in job.samples)
