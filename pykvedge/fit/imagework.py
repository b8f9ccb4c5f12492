"""Computes the floating-point operations of an image in the encoder and in the prompt, to find the cheaper setting.

A cap before the encoder (--image-max-tokens) reduces the pixels to encode and the tokens to read. A pruner behind the
encoder (--image-tokens) reduces only the tokens to read, and the encoder sees the whole image. Counts matrix products,
two operations per multiplication and addition; everything else is small beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from pykvedge.models.gguf import Header
from pykvedge.models.imagetokens import ImageGrid, token_limits
from pykvedge.models.shape import ModelShape


@dataclass(frozen=True)
class ImageWork:
    """Floating-point operations for one image. capped: the encoder takes images of any size."""

    encoder: int
    prompt: int  # reading all tokens of the image
    capped: bool

    @property
    def encoder_share(self) -> float:
        """Returns the encoder's share of all operations, from 0 to 1."""
        return self.encoder / max(self.encoder + self.prompt, 1)

    @property
    def better(self) -> str:
        """Returns the name of the setting that saves most. A pruner cannot save the encoder's work."""
        return "image_max_tokens" if self.capped and self.encoder_share >= 0.5 else "image_tokens"

    def as_json(self) -> dict[str, Any]:
        """Returns the object that `kvedge fit --json` prints."""
        share = round(self.encoder_share, 4)
        return {"encoder_flop": self.encoder, "prompt_flop": self.prompt, "encoder_share": share, "better": self.better}

    def line(self) -> str:
        """Returns a line for a person: the operations, and the better setting."""
        costs = f"An image costs the encoder {_readable(self.encoder)}, the prompt {_readable(self.prompt)}"
        if self.better == "image_max_tokens":
            return (
                f"{costs}: --image-max-tokens (before the encoder) saves more than --image-tokens (after the encoder)"
            )
        if self.capped:
            return f"{costs}: --image-tokens, after the encoder has read the whole image, saves most of this work"
        return (
            f"{costs}: this encoder has a fixed image size, so only --image-tokens (after the encoder) reduces tokens"
        )


def image_work(mmproj: Header, model: Header, grid: ImageGrid, prompt_tokens: int) -> ImageWork:
    """Returns the work of one image. prompt_tokens: of the whole prompt; an average token attends to half of it."""
    shape = ModelShape.of(model)
    seen = 4 * shape.n_head * shape.head_k * len(shape.layers) * prompt_tokens // 2
    a_token = 2 * _weights(model, "blk.", _active(model)) + seen
    encoder = 2 * (_weights(mmproj, "v.") * grid.n_patches * grid.parts + _weights(mmproj, "mm.") * grid.n_tokens)
    capped = token_limits(mmproj) is not None
    return ImageWork(encoder + grid.parts * _attention(mmproj, grid.n_patches), a_token * grid.n_tokens, capped)


def _readable(operations: int) -> str:
    """Writes a number of operations, as 3.4 TFLOP, 306.0 GFLOP, or 12.5 MFLOP."""
    for unit, size in (("TFLOP", 10**12), ("GFLOP", 10**9)):
        if operations >= size:
            return f"{operations / size:.1f} {unit}"
    return f"{operations / 10**6:.1f} MFLOP"


def _weights(header: Header, prefix: str, active: float = 1.0) -> int:
    """Counts the weights of matrices that multiply every row. active: the share of experts in use."""
    total = 0.0
    for name, tensor in header.tensors.items():
        if name.startswith(prefix) and len(tensor.shape) > 1 and "position_embd" not in name:
            total += prod(tensor.shape) * (active if "_exps." in name else 1.0)
    return int(total)


def _active(model: Header) -> float:
    used, there = (model.values.get(f"{model.architecture}.expert_{what}") for what in ("used_count", "count"))
    return used / there if isinstance(used, int) and isinstance(there, int) and there > 0 else 1.0


def _attention(mmproj: Header, n_patches: int) -> int:
    """Returns the operations of attention between patches. llama.cpp computes all pairs, even if windows mask some."""
    layers, width = (int(mmproj.values.get(f"clip.vision.{name}", 0)) for name in ("block_count", "embedding_length"))
    return 4 * layers * width * n_patches**2
