"""All samples are put to all methods, one after the other: whatever is finished compares the same ones."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pykvedge.errors import ContextError, ImageError, KvedgeError, UsageError
from pykvedge.lab.eval.measure import Cell, Measurer, Preparer, Wants
from pykvedge.lab.eval.reader import Reader
from pykvedge.lab.eval.records import Records, fingerprint
from pykvedge.lab.eval.tasks import Sample
from pykvedge.lab.jsonlines import SaveError
from pykvedge.lab.progress import Display
from pykvedge.models.vision import Vision
from pykvedge.plans.presets import plan
from pykvedge.runtime.interrupt import CancelledError, stop_if_set
from pykvedge.runtime.loaded import borrow
from pykvedge.runtime.settings import Settings

FULL = "full"


@dataclass
class Outcome:
    """A run came to this. left_out: lines that say what is missing and why."""

    records: Records
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True)
class Job:
    """A job says what to measure with which model. cells: the full cache comes first by itself."""

    model: Path
    mmproj: Path | None
    samples: list[Sample]
    cells: list[Cell]
    wants: Wants = field(default_factory=Wants)
    settings: Settings = field(default_factory=Settings)

    def header(self) -> dict[str, Any]:
        """Returns what must be equal in two runs whose results may lie in one file."""
        return {
            "model": fingerprint(self.model),
            "mmproj": fingerprint(self.mmproj) if self.mmproj else None,
            "kv_type": self.settings.kv_type,
            "answers": self.wants.answers,
            "likelihood": self.wants.likelihood,
            "max_tokens": self.wants.max_tokens,
            **({"compress": "context"} if self.wants.context else {}),
        }


def full_cell() -> Cell:
    return Cell(FULL, plan(FULL))


def evaluate(
    job: Job, records: Records, display: Display | None = None, cancel: threading.Event | None = None
) -> Outcome:
    """Measures what is not in `records` yet, and adds it.

    Setting `cancel` ends the run after what is under way; records stay.
    Raises ModelError, LibraryError, UsageError (a sample of the same name but other content was measured before).
    A sample that cannot be read or is too long, and a method that fails, are left out, and said in the outcome.
    """
    out, cancel = Outcome(records), cancel or threading.Event()
    full = full_cell()
    cells = [cell for cell in job.cells if cell.name != FULL]
    todo = [(sample, _missing(sample, full, cells, records)) for sample in job.samples]
    todo = [(sample, missing) for sample, missing in todo if missing]
    display = display or Display(enabled=False)
    if not todo:
        return out
    loan, reader = None, None
    try:
        loan = borrow(job.model, job.mmproj, job.settings, display, cancel)
        vision = Vision(loan.encoder) if loan.encoder else None
        reader = Reader(loan.model, vision, loan.threads, job.settings.kv_type, job.settings.n_ctx)
        reader.stop_when(cancel)
        preparer = Preparer(loan.model, vision, partial(stop_if_set, cancel), job.wants.context)
        run = _Run(out, full, cells, display, cancel, preparer, Measurer(loan.model, reader, job.wants))
        for sample, missing in todo:
            run.one(sample, missing)
    except CancelledError:
        out.interrupted = True
    finally:
        if reader is not None:
            reader.close()
        if loan is not None:
            loan.give_back()
        display.done()
    return out


def _missing(sample: Sample, full: Cell, cells: list[Cell], records: Records) -> set[tuple[str, str]]:
    missing = set()
    for cell in (full, *cells):
        row = records.rows.get((sample.id, cell.name, str(cell.budget)))
        if row is None:
            missing.add(cell.key)
        elif row["digest"] != sample.digest():
            raise UsageError(f"sample {sample.id} was another one when it was measured before; save to another file")
        elif row["plan"] != cell.digest:
            name = f"{cell.name} at {cell.plan.budget}"
            raise UsageError(f"{name} was another plan when it was measured before; save to another file")
    return missing


@dataclass
class _Run:
    out: Outcome
    full: Cell
    cells: list[Cell]
    display: Display
    cancel: threading.Event
    preparer: Preparer
    measurer: Measurer

    def one(self, sample: Sample, missing: set[tuple[str, str]]) -> None:
        """Measures a sample by the cells that it lacks. Raises CancelledError, SaveError."""
        stop_if_set(self.cancel)
        cells = [cell for cell in self.cells if cell.key in missing]
        self.display.step(sample.task, 0)
        try:
            prepared = self.preparer.prepare(sample)
        except (ImageError, ContextError) as error:
            self._skip(sample, error, len(missing))
            return
        try:
            for cell, record in self.measurer.measure(prepared, self.full, cells, self._fail):
                if cell.key in missing:
                    self.out.records.add(_record(sample, cell, record))
                    self.display.step(f"{sample.task}, {cell.name} {cell.plan.budget}")
        except ContextError as error:
            self._skip(sample, error, len(missing))
        finally:
            self.preparer.release(prepared.turns)
        self.out.records.sync()

    def _skip(self, sample: Sample, error: KvedgeError, steps: int) -> None:
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
    """Counts the records that a run will add."""
    cells = [cell for cell in job.cells if cell.name != FULL]
    return sum(len(_missing(sample, full_cell(), cells, records)) for sample in job.samples)
