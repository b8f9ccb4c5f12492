"""Losses of heads go to a file of JSON lines while they are measured, so that a long run can go on after a break.

The first line says what is measured. Then comes a line for each head of a sample, and when all its heads are measured
one with the loss of the baseline, which ends the sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvedge_lab.jsonlines import JsonLines, go_on
from pykvedge.errors import UsageError

VERSION = 1
Place = tuple[int, int]  # (layer of the model, KV head)


class CurveFile:
    """These are the losses so far, by sample and head. Without a path they are kept in memory only."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], n_points: int, resume: bool = False) -> None:
        """header: must be that of the file, when there is one already.

        Raises UsageError for a file that is there without `resume`, that is none of ours, or that was measured in
        another way; SaveError if it cannot be written.
        """
        self.heads: dict[int, dict[Place, list[float]]] = {}
        self.baselines: dict[int, float] = {}
        self._n_points = n_points
        first = {"kvedge_curves": VERSION, **header}
        good = go_on(path, resume, lambda file, lines: self._read(file, lines, first))
        self._file = JsonLines(path, good)
        if not good:
            self._file.add(first)

    def add(self, sample: int, place: Place, losses: list[float]) -> None:
        """Keeps the losses of a head, one a point. Raises SaveError."""
        self._file.add({"sample": sample, "layer": place[0], "head": place[1], "losses": losses})
        self.heads.setdefault(sample, {})[place] = losses

    def end(self, sample: int, baseline: float) -> None:
        """Keeps the loss of the baseline: of this sample nothing is missing. Raises SaveError."""
        self._file.add({"sample": sample, "baseline": baseline})
        self._file.sync()
        self.baselines[sample] = baseline

    def close(self) -> None:
        """Ends the file. Does nothing the second time."""
        self._file.close()

    def _read(self, path: Path, lines: list[bytes], header: Mapping[str, Any]) -> None:
        """Takes over what the file holds."""
        try:
            first, *rows = [json.loads(line) for line in lines]
            _ = first["kvedge_curves"]
            changed = [name for name in dict.fromkeys((*header, *first)) if first.get(name) != header.get(name)]
            for row in rows if not changed else []:
                self._take(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{path} holds no losses of kvedge calibrate budgets; save to another file") from None
        for name in changed[:1]:
            then, now = first.get(name), header.get(name)
            raise UsageError(f"{path} was measured with {name} {then!r:.80}, not {now!r:.80}; save to another file")

    def _take(self, row: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError for a line that is none of ours."""
        numbers = np.array(row["losses"] if "losses" in row else [row["baseline"]], dtype=np.float64)
        if numbers.shape != (self._n_points if "losses" in row else 1,) or not np.isfinite(numbers).all():
            raise ValueError(row)
        if "losses" in row:
            self.heads.setdefault(int(row["sample"]), {})[int(row["layer"]), int(row["head"])] = numbers.tolist()
        else:
            self.baselines[int(row["sample"])] = float(numbers[0])
