"""The matrix of a bench: every variant on every prompt of every model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pykvedge.models.offload import Offload
from pykvedge.plans.plan import Plan
from pykvedge.runtime.settings import Keep
from pykvedge.system.shown import counted

STOCK = "stock"


@dataclass(frozen=True)
class ModelFiles:
    """A model's file, and the file of its image encoder for prompts with images."""

    model: Path
    mmproj: Path | None = None

    @property
    def name(self) -> str:
        """The name in tables: the file's, or the folder's if the file's name says nothing."""
        stem = self.model.stem
        return self.model.resolve().parent.name if stem in ("model", "ggml-model") else stem


@dataclass(frozen=True)
class Shape:
    """The shape of a prompt: tokens of text, half of them before the images, and images of width x height pixels."""

    text_tokens: int
    images: int = 0
    width: int = 336
    height: int = 336

    @property
    def name(self) -> str:
        return f"{self.text_tokens} text" + (f" + {counted(self.images, 'image')}" if self.images else "")

    @property
    def assumed_tokens(self) -> int:
        """The number of tokens, if each image has 1024; the encoder knows how many."""
        return self.text_tokens + 1024 * self.images


@dataclass(frozen=True)
class Variant:
    """A plan to run a model by. None: llama.cpp's own attention and cache, as without patches."""

    name: str
    plan: Plan | None = None
    kv_type: str = "f16"
    keep: Keep | None = None  # where whole rows stay behind kept rows

    @property
    def label(self) -> str:
        """Name, budget, tokens left of each image, storage type unless f16, and the place of whole rows."""
        budget = f" {self.plan.budget.value:g}" if self.plan and self.plan.budget.ratio != 1.0 else ""
        if self.plan and self.plan.pruner != "none":
            budget += f", {self.plan.pruner} {self.plan.image_tokens}"
        kept = f", keep {self.keep.place}" if self.keep else ""
        kept += f" {self.keep.type}" if self.keep and self.keep.type != "f16" else ""
        return self.name + budget + (f" {self.kv_type}" if self.kv_type != "f16" else "") + kept


MAX_ROUNDS = 25


@dataclass(frozen=True)
class Matrix:
    """What is measured, and how often. Stock is measured too, first."""

    models: list[ModelFiles]
    shapes: list[Shape]
    variants: list[Variant]
    repeat: int = 5  # rounds
    fill_s: float = 0.0  # if a prompt's rounds take less in total, more rounds follow, up to MAX_ROUNDS
    generate: int = 32  # tokens per repetition
    threads: int = 0
    offload: Offload = field(default_factory=Offload)
    again: bool = False  # each variant also begins a second conversation about the same images
    timeline: bool = False  # one more run of each variant, with its memory recorded
    device_peak: bool = False  # one more run of each variant, with the devices' memory recorded
    later: int = 0  # tokens of a message after the answer; 0: no message

    @property
    def steps(self) -> int:
        """The least number of repetitions, with the warm-up."""
        return len(self.models) * len(self.shapes) * (len(self.variants) + 1) * (self.repeat + 1)
