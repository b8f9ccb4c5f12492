"""Grid: keeps the rows at the centres of equal cells, a baseline that ignores the contents of rows."""

from __future__ import annotations

import math

import numpy as np

from pykvedge.reference.stages.base import ImageRows, Settings


def cells(down: int, across: int, n: int) -> tuple[int, int]:
    """Returns the most cells (a, b) with a <= down, b <= across, a * b <= n; ties: squarest cells, then smallest a."""
    pairs = [(a, min(across, n // a)) for a in range(1, min(down, n) + 1)]
    most = max(a * b for a, b in pairs)
    return min(
        (pair for pair in pairs if pair[0] * pair[1] == most),
        key=lambda pair: (abs(math.log(down * pair[1] / (pair[0] * across))), pair[0]),
    )


def prune(image: ImageRows, n: int, settings: Settings) -> np.ndarray:
    """Returns [a * b <= n] int64: row floor((i + 1/2) down / a), column floor((j + 1/2) across / b) of cells (i, j)."""
    down, across = image.grid
    a, b = cells(down, across, n)
    y = (2 * np.arange(a) + 1) * down // (2 * a)
    x = (2 * np.arange(b) + 1) * across // (2 * b)
    return (y[:, None] * across + x[None, :]).ravel()


SUMMARY = "rows at even distances"
SOURCE = "a baseline"
