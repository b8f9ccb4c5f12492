"""Measures kept shares of the layers: the mean of PrefixKV's search over a few prompts (section 3.3)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from kvedge_lab.calibrate.samples import Labelled
from pykvedge.chat.session import Session
from pykvedge.errors import NothingToCompressError, UsageError
from pykvedge.models.model import Progress, silent
from pykvedge.plans.making import plan


def check_budgets(budgets: Sequence[float]) -> None:
    """Raises UsageError for budgets that are not ascending shares."""
    if not budgets or any(not a < b < 1 for a, b in zip((0.0, *budgets), budgets, strict=False)):
        raise UsageError("budgets must be shares above 0 and below 1.0, in ascending order, for example 0.1,0.2,0.5")


def kept_shares(
    session: Session,
    budgets: Sequence[float],
    samples: Iterable[Labelled],
    count: int,
    progress: Progress = silent,
    cancel: threading.Event | None = None,
) -> tuple[np.ndarray, int]:
    """Returns the mean share of a prompt that each layer keeps, [layers of the model, budgets], and the sample count.

    Layers that kvedge does not store have the budget itself. Raises NothingToCompressError, CancelledError, UsageError.
    """
    check_budgets(budgets)
    totals = np.zeros((session.model.n_layer, len(budgets)))
    used = 0
    for number, sample in enumerate(itertools.islice(samples, count)):
        pieces = session.first_prompt(sample.question, sample.pictures)
        try:
            session.engine.encode(pieces, silent, cancel)
            for i, budget in enumerate(budgets):
                progress("searching the layers' shares", (number + i / len(budgets)) / count)
                totals[:, i] += _shares(session, pieces, budget, cancel)
        finally:
            session.release(pieces)
        used += 1
    return totals / max(used, 1), used


def _shares(session: Session, pieces: list, budget: float, cancel: threading.Event | None) -> np.ndarray:
    engine, wanted = session.engine, plan("prefixkv", float(budget), decode="keep-all")
    engine.close()
    engine.make_room(pieces, wanted)
    engine.prefill(pieces, silent, cancel)
    engine.compress()
    if engine.cache is None:
        raise NothingToCompressError(
            f"{session.model.path.name} has no layers that kvedge can compress; use another model"
        )
    out = np.full(session.model.n_layer, budget)
    n_tokens = sum(p.n_tokens for p in pieces)
    out[engine.cache.layer_ids()] = [np.mean(heads) / n_tokens for heads in engine.cache.lengths()]
    return out
