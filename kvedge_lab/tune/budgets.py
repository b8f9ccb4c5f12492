"""Calibrates budgets of heads before plans are measured, if a model has none and the time allows enough care."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from kvedge_lab.calibrate.budgets import CurveFile, measure_curves, setup_for
from kvedge_lab.calibrate.samples import Labelled
from kvedge_lab.eval.reader import Reader
from kvedge_lab.eval.tasks import Sample
from kvedge_lab.progress import clock
from kvedge_lab.tune.race import Race
from pykvedge.errors import KvedgeError, ProfileError
from pykvedge.models import profiles
from pykvedge.plans.making import plan as make_plan
from pykvedge.plans.presets import DEFAULT_METHOD

SAMPLES, POINTS = 6, 8  # fewer give budgets that harm a model
SCORER, BASELINE, TARGETS = "mixkv", 0.05, (0.05, 0.1, 0.2)
SHARE = 0.3  # share of the time


class _TooLongError(KvedgeError):
    """The measurements would take too long."""


def calibrate(race: Race, reader: Reader, path: Path, say: Callable[[str], None]) -> None:
    """Calibrates budgets of heads if a plan needs them and there are none, at the start of a run.

    path: file of losses, for a run that is continued. say: called with the result. Raises CancelledError.
    """
    wanted = any("head-budgets" in cell.plan.profile_kinds().values() for cell in race.cells)
    there = bool(profiles.find(make_plan(DEFAULT_METHOD), race.loan.model.path))
    own: list[list[Sample]] = []  # contexts on which no plan is measured
    if wanted and (not there or path.exists()):  # a continued run leaves out the same contexts
        own = list(itertools.islice(race.material.contexts, SAMPLES))
    if own and not there and not race.kept.rows:
        say(_calibrated(race, reader, own, path))


def _calibrated(race: Race, reader: Reader, contexts: list[list[Sample]], path: Path) -> str:
    """Writes the budgets of a model's heads to the profile's place (race.profile). Returns a line about the result."""
    began, model = time.monotonic(), race.loan.model

    def on_estimate(runs: int, seconds: float) -> Callable[[str, int], None]:
        if time.monotonic() - began + seconds > SHARE * race.seconds:
            raise _TooLongError(clock(seconds))
        race.display.skip(-runs)
        return race.display.step

    setup = setup_for(SCORER, BASELINE, POINTS, TARGETS)
    source = map(_labelled, contexts)
    kept = CurveFile(path, setup.header(model.path, race.material.source), POINTS, resume=True)
    try:
        found = measure_curves(reader, setup, source, SAMPLES, kept, on_estimate, race.cancel)
        values = found.shares(setup, model.n_layer)
    except _TooLongError as error:
        return f"budgets of heads were not calibrated, because this would take {error}, too long for --minutes"
    except ProfileError as error:
        return f"budgets of heads were not calibrated: {error}"
    finally:
        kept.close()
    made = {"command": "kvedge tune", "data": race.material.source}
    _, race.profile = profiles.save(model.header, "head-budgets", values, found.samples, made)
    return f"budgets of heads were calibrated: {race.profile}"


def _labelled(context: list[Sample]) -> Labelled:
    [message] = context[0].messages()
    return Labelled(message.text, tuple(message.pictures))
