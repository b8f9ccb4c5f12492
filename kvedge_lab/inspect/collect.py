"""Runs a prompt, and reads the data of the figures from the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvedge_lab.inspect import measures
from pykvedge.chat.session import Session
from pykvedge.errors import UsageError
from pykvedge.library import libkvedge
from pykvedge.models.images import Picture
from pykvedge.models.imagetokens import Places
from pykvedge.models.vision import ImagePiece, Piece
from pykvedge.plans.making import another
from pykvedge.plans.plan import Plan

GAMMA = 0.2  # cut-off of the outlier ratio; FlashCache's best value


@dataclass(frozen=True)
class PromptImage:
    """One image of the prompt: tokens first .. first + count - 1."""

    picture: Picture
    first: int
    count: int
    places: Places | None  # grid of the encoder's rows; None: unknown
    rows: np.ndarray | None = None  # [count] numbers of the rows that a pruner left; None: all


@dataclass
class Findings:
    """The data of all figures. L layers, Hkv KV heads, T tokens."""

    model: str
    prompt: str
    layers: list[int]  # numbers of the layers in the model
    image_mask: np.ndarray  # [T] bool
    images: list[PromptImage]
    importance: np.ndarray  # [L, T] float64, received attention, averaged over the heads
    redundancy: np.ndarray  # [L, Hkv] float64
    spectrum_k: np.ndarray  # [L, T] float64
    spectrum_v: np.ndarray  # [L, T] float64
    outliers: np.ndarray  # [L] float64
    kept: dict[str, list[list[list[int]]]] = field(default_factory=dict)  # method -> [L][Hkv] token indices

    @property
    def n_tokens(self) -> int:
        return len(self.image_mask)

    @property
    def gini(self) -> np.ndarray:
        """[L] float64: Gini coefficient of the importance."""
        return np.array([measures.gini(row) for row in self.importance])

    def lengths(self, method: str) -> list[list[int]]:
        """Returns the number of pairs that a method keeps, per layer and head."""
        return [[len(head) for head in layer] for layer in self.kept[method]]

    def budgets(self, method: str) -> np.ndarray:
        """Returns [L, Hkv] int64: `lengths` as an array; 0 for missing heads of a layer."""
        lengths = self.lengths(method)
        out = np.zeros((len(lengths), max(map(len, lengths))), dtype=np.int64)
        for row, layer in zip(out, lengths, strict=True):
            row[: len(layer)] = layer
        return out

    def keep_share(self, method: str) -> np.ndarray:
        """Returns [L, T] float64: the share of a layer's KV heads that keep a token."""
        out = np.zeros((len(self.layers), self.n_tokens))
        for row, layer in zip(out, self.kept[method], strict=True):
            for head in layer:
                row[head] += 1 / len(layer)
        return out

    def arrays(self) -> dict[str, Any]:
        """Returns the content of the .npz file: plain arrays, names without spaces."""
        out: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("image_mask", "importance", "redundancy", "spectrum_k", "spectrum_v", "outliers", "gini")
        }
        out["layers"] = np.array(self.layers)
        for method in self.kept:
            out[f"keep_share.{method}"] = self.keep_share(method)
            out[f"budgets.{method}"] = self.budgets(method)
        return out


def collect(session: Session, prompt: str, pictures: list[Picture], plans: list[Plan]) -> Findings:
    """Reads the prompt once to measure its cache, and once per plan to get the kept tokens.

    Raises what Session.ask raises, NothingToCompressError for a model whose cache stays with llama.cpp, UsageError for
    plans that read different tokens of an image.
    """
    found: list[Findings] = []
    # with a budget below 1 the scorer gathers attention; `measure` runs before the compression
    everything, *others = (another(plan, "h2o", 0.5) for plan in plans)
    if any(other != everything for other in others):
        raise UsageError("methods with different pruners cannot be compared; inspect these methods one by one")

    def measure(cache: libkvedge.Cache, pieces: list[Piece]) -> None:
        found.append(_measure(session, cache, pieces, prompt, pictures))

    session.examine(prompt, pictures, everything, measure)
    [findings] = found
    for plan in plans:
        findings.kept[plan.method] = session.examine(prompt, pictures, plan)
    return findings


def _measure(
    session: Session, cache: libkvedge.Cache, pieces: list[Piece], prompt: str, pictures: list[Picture]
) -> Findings:
    n_layers = cache.stats().n_layers
    importance, redundancy, outliers = [], [], []
    spectra: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for layer in range(n_layers):
        _, n_heads_kv, _, _ = libkvedge.shape(cache, layer)
        heads = [libkvedge.rows(cache, layer, head) for head in range(n_heads_kv)]
        k, v = (np.stack(x) for x in zip(*heads, strict=True))
        importance.append(libkvedge.pending_scores(cache, layer).mean(axis=0).astype(np.float64))
        redundancy.append(measures.head_redundancy(k))
        for rows, to in ((k, spectra[0]), (v, spectra[1])):
            to.append(measures.power_spectrum(rows))
        outliers.append(measures.outlier_ratio(k, v, GAMMA))
    widest = max(map(len, redundancy))
    padded = np.full((n_layers, widest), np.nan)
    for row, values in zip(padded, redundancy, strict=True):
        row[: len(values)] = values
    mask, images = _places(pieces, pictures)
    return Findings(
        model=session.model.path.name,
        prompt=prompt,
        layers=[cache.layer_id(i) for i in range(n_layers)],
        image_mask=mask,
        images=images,
        importance=np.stack(importance),
        redundancy=padded,
        spectrum_k=np.stack(spectra[0]),
        spectrum_v=np.stack(spectra[1]),
        outliers=np.array(outliers),
    )


def _places(pieces: list[Piece], pictures: list[Picture]) -> tuple[np.ndarray, list[PromptImage]]:
    """Returns a mask of image tokens, and the pictures' places. Pictures that are cut into slices have no place."""
    images = [p for p in pieces if isinstance(p, ImagePiece)]
    whole = len(images) == len(pictures)
    mask: list[bool] = []
    found: list[PromptImage] = []
    for piece in pieces:
        if isinstance(piece, ImagePiece) and whole:
            found.append(PromptImage(pictures[len(found)], len(mask), piece.n_tokens, piece.places, piece.kept))
        mask += [isinstance(piece, ImagePiece)] * piece.n_tokens
    return np.array(mask, dtype=bool), found
