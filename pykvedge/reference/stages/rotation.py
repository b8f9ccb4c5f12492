"""Rotary position encoding: each pair of a row's channels is rotated by an angle that grows with the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pykvedge.errors import ArrayError

PAIRS = ("norm", "neox")  # channels 2i and 2i + 1 (Llama); channels i and i + n (GPT-NeoX, Qwen)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotates pair i of a row's channels by angles[i] radians per position. Channels after the pairs do not change.

    angles: [n] float64, for 2n channels; empty by default. Raises ArrayError.
    """

    angles: np.ndarray = field(default_factory=lambda: np.zeros(0))
    pairs: str = "neox"

    def __post_init__(self) -> None:
        angles = np.ascontiguousarray(self.angles, dtype=np.float64)
        if angles.ndim != 1 or not np.isfinite(angles).all():
            raise ArrayError(f"the angles of a rotation must be [n] finite numbers, not {list(angles.shape)}")
        if self.pairs not in PAIRS:
            raise ArrayError(f"the pairs of a rotation must be {' or '.join(PAIRS)}, not {self.pairs!r}")
        object.__setattr__(self, "angles", angles)

    @classmethod
    def of(
        cls, size: int, base: float = 10000.0, pairs: str = "neox", factors: Sequence[float] | None = None
    ) -> Rotation:
        """The usual rotation of `size` channels: base ** (-2i / size), divided by `factors` [size / 2] if given."""
        angles = base ** (-np.arange(0, size, 2) / size)
        return cls(angles if factors is None else angles / np.asarray(factors, dtype=np.float64), pairs)

    def _places(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first and the second channels of all pairs. Raises ArrayError if `size` channels are too few."""
        n = len(self.angles)
        if 2 * n > size:
            raise ArrayError(f"a rotation of {2 * n} channels does not fit a head of {size}")
        i = np.arange(n)
        return (2 * i, 2 * i + 1) if self.pairs == "norm" else (i, i + n)

    def back(self, rows: np.ndarray, first: int) -> np.ndarray:
        """Removes the rotation of rows [..., T, d] at positions first, first + 1, ...: float64, in the same shape."""
        return self.on(rows, -np.arange(first, first + rows.shape[-2]))

    def on(self, rows: np.ndarray, by: np.ndarray) -> np.ndarray:
        """Rotates rows [..., T, d] forward by `by` [T] positions; a negative number rotates back. Returns float64."""
        turn = np.asarray(by)[:, None] * self.angles
        a, b = self._places(rows.shape[-1])
        out = rows.astype(np.float64)
        x, y = out[..., a].copy(), out[..., b].copy()
        out[..., a] = x * np.cos(turn) - y * np.sin(turn)
        out[..., b] = y * np.cos(turn) + x * np.sin(turn)
        return out

    def mean(self, first: int, n: int, size: int) -> np.ndarray:
        """Returns the mean rotation matrix of n positions from `first` on: [size, size] float64, for a row [size]."""
        turn = np.arange(first, first + n)[:, None] * self.angles
        cos, sin = np.cos(turn).mean(axis=0), np.sin(turn).mean(axis=0)
        a, b = self._places(size)
        out = np.eye(size)
        out[a, a] = out[b, b] = cos
        out[b, a], out[a, b] = sin, -sin
        return out
