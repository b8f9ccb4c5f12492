"""Losses of heads go to a file of JSON lines while they are measured, so that a long run can go on after a break.

The first line says what is measured. Then comes a line for each head of a sample, and when all its heads are measured
one with the loss of the baseline, which ends the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvedge_lab.jsonlines import Results

Place = tuple[int, int]  # (layer of the model, KV head)


class CurveFile(Results):
    """These are the losses so far, by sample and head."""

    KIND, WHAT = "kvedge_curves", "losses of kvedge calibrate budgets"

    def __init__(self, path: Path | None, header: Mapping[str, Any], n_points: int, resume: bool = False) -> None:
        """Raises what Results raises."""
        self.heads: dict[int, dict[Place, list[float]]] = {}
        self.baselines: dict[int, float] = {}
        self._n_points = n_points
        super().__init__(path, header, resume)

    def add(self, sample: int, place: Place, losses: list[float]) -> None:
        """Keeps the losses of a head, one a point. Raises SaveError."""
        self._file.add({"sample": sample, "layer": place[0], "head": place[1], "losses": losses})
        self.heads.setdefault(sample, {})[place] = losses

    def end(self, sample: int, baseline: float) -> None:
        """Keeps the loss of the baseline: of this sample nothing is missing. Raises SaveError."""
        self._file.add({"sample": sample, "baseline": baseline})
        self.sync()
        self.baselines[sample] = baseline

    def _take(self, row: dict[str, Any]) -> None:
        numbers = np.array(row["losses"] if "losses" in row else [row["baseline"]], dtype=np.float64)
        if numbers.shape != (self._n_points if "losses" in row else 1,) or not np.isfinite(numbers).all():
            raise ValueError(row)
        if "losses" in row:
            self.heads.setdefault(int(row["sample"]), {})[int(row["layer"]), int(row["head"])] = numbers.tolist()
        else:
            self.baselines[int(row["sample"])] = float(numbers[0])
