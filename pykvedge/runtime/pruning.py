"""Runs a plan's pruner: chooses the rows of an image that the model reads."""

from __future__ import annotations

import ctypes as c
from dataclasses import replace

import numpy as np

from pykvedge.library.native_plan import NativePlan
from pykvedge.models.imagetokens import Places
from pykvedge.models.vision import ImagePiece, Piece
from pykvedge.native.abi import GivenImage
from pykvedge.native.calls import call
from pykvedge.plans.plan import Plan
from pykvedge.plans.plugins import table
from pykvedge.reference.stages.base import ImageRows


def planned(pieces: list[Piece], plan: Plan, threads: int) -> list[Piece]:
    """Prunes the images among the pieces: encoded images at once, other images when they are encoded.

    A returned image is a new piece that shares its chunk with the given piece: release only one of them. threads: 0:
    all cores.
    """
    if plan.pruner == "none":
        return pieces
    pruning = PlannedPruning(plan, threads)
    return [pruning.planned(piece) if isinstance(piece, ImagePiece) else piece for piece in pieces]


class PlannedPruning:
    """Chooses rows of an image by a plan (models/vision.py, Pruning)."""

    def __init__(self, plan: Plan, threads: int) -> None:
        """threads: 0: all cores."""
        self._plan, self._threads = plan, threads

    def planned(self, piece: ImagePiece) -> ImagePiece:
        """Returns a copy of a whole image, to be pruned."""
        out = replace(piece, pruning=self, n_tokens=self._plan.image_tokens.count(piece.n_rows))
        if piece.embeddings is not None:
            out.kept, out.embeddings = self.choose(piece.embeddings, piece.places)
            out.n_tokens = len(out.kept)
        return out

    def choose(self, rows: np.ndarray, places: Places | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the kept row numbers [n], ascending, and the rows that the model reads, [n, width] float32.

        Raises PluginError if a plugin's pruner fails.
        """
        rows, n = np.ascontiguousarray(rows, np.float32), self._plan.image_tokens.count(len(rows))
        place = (places.down, places.across) if places is not None else None
        plugin = table.get("pruner", self._plan.pruner)
        if plugin is not None and plugin.pruned is not None:
            return plugin.pruned(ImageRows(rows, place), n, self._plan.settings("pruner"))
        return by_library(self._plan, ImageRows(rows, place), self._threads)


def by_library(plan: Plan, image: ImageRows, threads: int) -> tuple[np.ndarray, np.ndarray]:
    n_rows, width = image.rows.shape
    down, across = image.place or (0, 0)
    given = GivenImage(c.sizeof(GivenImage), image.rows.ctypes.data, n_rows, width, down, across)
    kept, rows, n = np.empty(n_rows, np.int32), np.empty((n_rows, width), np.float32), c.c_int32(n_rows)
    with NativePlan(plan) as native:
        call("prune", native.handle, c.byref(given), threads, kept.ctypes.data, rows.ctypes.data, c.byref(n))
    return kept[: n.value].astype(np.int64), rows[: n.value].copy()
