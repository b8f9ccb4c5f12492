"""Measures plans context by context until the time is over: all plans on a few contexts, better plans on more.

The figures of every answer are written when they are measured. A later run reads them and takes the same decisions up
to the point where the earlier run was stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvedge_lab.eval.measure import CONTEXT, PROMPT, Cell, MeasureOptions, Measurer, Preparer
from kvedge_lab.eval.reader import Reader, reading
from kvedge_lab.eval.records import Records
from kvedge_lab.eval.runner import Outcome, Run, full_cell, lacking
from kvedge_lab.eval.tasks import Sample
from kvedge_lab.progress import Steps
from kvedge_lab.tune import choice
from kvedge_lab.tune.choice import Found
from kvedge_lab.tune.figures import figures, telling, usual_effects
from kvedge_lab.tune.material import Material, for_way
from pykvedge.runtime.interrupt import CancelledError, stop_if_set
from pykvedge.runtime.loaded import Loan
from pykvedge.runtime.settings import Settings

WAYS = (PROMPT, CONTEXT)  # the question is in the prompt; the question comes later
FIRST = 4  # contexts on which all plans are measured
ANSWER = 64  # tokens of a reference answer
OUTPUTS = 64  # tokens of an answer in one pass
CHOOSING = 0.5  # share of the time
SURE, ALIKE = 0.5, 0.8  # limits: answers below SURE or above ALIKE say too little for a comparison


class RaceRecords(Records):
    """The figures so far, with the seconds of the run at which they came."""

    KIND, VERSION, WHAT = "kvedge_tune", 1, "an unfinished run of kvedge tune"
    NEEDED = ("tokens", "top1", "kld", "full_bytes", "kept_bytes", "at")

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        super().__init__(path, header, resume=True)
        self._before = max((row.get("at", 0.0) for row in self.rows.values()), default=0.0)
        self._began = time.monotonic()

    def spent(self) -> float:
        """Returns the seconds of this run and of the earlier runs in the file."""
        return self._before + time.monotonic() - self._began

    def add(self, record: dict[str, Any]) -> None:
        super().add({**record, "at": round(self.spent(), 2)})


@dataclass
class Race:
    """A comparison of plans on contexts, with a time limit."""

    loan: Loan
    settings: Settings
    material: Material
    cells: list[Cell]
    default: Cell
    target: float
    seconds: float
    kept: RaceRecords
    display: Steps
    cancel: threading.Event
    contexts: list[list[Sample]] = field(default_factory=list)
    finalists: list[Cell] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    profile: Path | None = None  # calibrated for this race
    _slowest: float = 0.0  # seconds of the slowest recent context

    def run(self, ready: Callable[[Reader], None]) -> None:
        """Measures until the time is over. ready(reader): called first. Raises CancelledError, SaveError."""
        with self._reading() as reader:
            ready(reader)
            outcome = self._begin(reader)
            try:
                self.decide()
            finally:
                self.left_out += outcome.left_out

    def decide(self) -> None:
        """Chooses finalists on one half of the contexts, and measures them on the other half while time remains."""
        if self._choose():
            for _ in self._measured(1, self.finalists, self.seconds):
                pass

    def _begin(self, reader: Reader) -> Outcome:
        outcome = Outcome(self.kept)
        self._runs = {way: self._way(way, reader, outcome) for way in WAYS}
        return outcome

    @property
    def choosing(self) -> list[list[Sample]]:
        """The contexts on which plans are chosen, with all ways of asking."""
        return self.contexts[::2]

    @property
    def proving(self) -> list[list[Sample]]:
        return self.contexts[1::2]

    def figures(self, contexts: Sequence[Sequence[Sample]], cells: Sequence[Cell] | None = None, n: int = 1) -> Found:
        """Returns the figures of plans. n: number of intervals that hold together."""
        usual = usual_effects(self.cells, self.kept.rows, self.choosing)
        return figures(self.cells if cells is None else cells, self.kept.rows, contexts, usual, choice.level(n))

    def problem(self) -> str:
        """Returns why the answers are no basis for a choice, or ""."""
        found = telling(self.kept.rows, self.contexts)
        if found["sure"] < SURE:
            return (f"the model is unsure about these pictures: sampled again, it repeats only "
            f"{100 * found['sure']:.0f} % of its tokens")  # fmt: skip
        if found["alike"] > ALIKE:
            return (f"the model does not distinguish these pictures: {100 * found['alike']:.0f} % of them got the "
            f"same answers from the full cache")  # fmt: skip
        return ""

    def _choose(self) -> bool:
        """Chooses the finalists. Returns whether there is something to prove."""
        alive, until, size = list(self.cells), CHOOSING * self.seconds, FIRST
        for n, _ in enumerate(self._measured(0, alive, until), 1):
            if n == FIRST and self.problem():
                return False
            if n == size:
                keep = choice.survivors(alive, self.figures(self.choosing, alive), self.target, self.default)
                alive[:] = [cell for cell in keep if cell in self.cells]
                size *= 2
        self.finalists = choice.finalists(alive, self.figures(self.choosing, alive), self.target, self.default)
        return True

    def _measured(self, half: int, cells: list[Cell], until: float) -> Iterator[int]:
        """Measures plans on the contexts of a half, one by one, and yields their number so far. `cells` may change."""
        done, n = 0, half
        while self._reach(n):
            lacks = any(lacking(one, full_cell(), cells, self.kept) for one in self.contexts[n])
            if lacks and done >= (FIRST if half == 0 else 0) and self.kept.spent() + self._slowest > until:
                return
            if lacks and self.kept.spent() > self.seconds:
                return
            if lacks:
                began = time.monotonic()
                self._context(n, cells)
                self._slowest = max(0.8 * self._slowest, time.monotonic() - began)
            done, n = done + 1, n + 2
            yield done

    def _reach(self, n: int) -> bool:
        """Takes contexts from the material up to number n. Returns False if there are too few."""
        while len(self.contexts) <= n:
            context = next(self.material.contexts, None)
            if context is None:
                return False
            self.contexts.append([one for way in WAYS for one in for_way(context, way)])
        return True

    def _context(self, n: int, cells: list[Cell]) -> None:
        """Measures what a context lacks. Its questions share one reading of the pictures."""
        for way, run in self._runs.items():
            run.cells = [cell for cell in cells if cell in self.cells]
            samples = [one for one in self.contexts[n] if one.id.endswith(f":{way}")]
            todo = [(one, lacks) for one in samples if (lacks := lacking(one, run.full, run.cells, self.kept))]
            if todo:
                run.one(todo)
            self.cells[:] = [c for c in self.cells if c in run.cells or c not in cells]  # a failing plan leaves

    def _way(self, way: str, reader: Reader, outcome: Outcome) -> Run:
        options = MeasureOptions(answers=False, max_tokens=ANSWER, compress=way, against_full=True)
        preparer = Preparer(reader.model, reader.vision, partial(stop_if_set, self.cancel), way)
        return Run(outcome, full_cell(), [], self.display, self.cancel, preparer, Measurer(reader, options))

    @contextmanager
    def _reading(self) -> Iterator[Reader]:
        """Yields a reader of the model. The reader ends when the time has been over for long."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.cancel.set()

        timer = threading.Timer(min(max(1.1 * self.seconds - self.kept.spent(), 1.0), threading.TIMEOUT_MAX), stop)
        timer.daemon = True
        with reading(self.loan, self.settings, self.cancel, OUTPUTS) as reader:
            timer.start()
            try:
                yield reader
            except CancelledError:
                if not late.is_set():
                    raise
            finally:
                timer.cancel()
