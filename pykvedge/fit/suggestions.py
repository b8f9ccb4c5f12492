"""A short list of small vision-language models that exist as GGUF with an image encoder, and whether they fit here.

The repositories are those that llama.cpp's docs/multimodal.md names. The shapes are the published ones; sizes are
computed from them, parameters times bits, and memory with the arithmetic of `kvedge fit`: about right, none was run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykvedge.fit.footprint import Files, Request, Weights, footprint, process_bytes
from pykvedge.models.shape import Layer, ModelShape
from pykvedge.plans.making import default_plan

_BITS = {"Q4_K_M": 5.0, "Q8_0": 8.5}  # of a parameter, tables and larger types of some matrices included
_ENCODER_BITS = 16.0  # of f16, the most that a repository's encoder is taken in
_TEXT_TOKENS = 64


@dataclass(frozen=True)
class Tower:
    """An image encoder: a plain transformer of this shape, and what joins it to the model."""

    width: int
    n_ff: int
    n_layer: int
    n_patches: int  # of one pass
    image_size: int  # pixels along a side of one pass
    joining: int  # parameters of the projector, and of the tables at the ends
    gated: bool = False  # three matrices in the feed-forward block

    @property
    def parameters(self) -> int:
        block = 4 * self.width**2 + (3 if self.gated else 2) * self.width * self.n_ff
        return self.n_layer * block + self.joining

    @property
    def compute(self) -> int:
        """Bytes that one pass takes, as footprint.encoder_compute counts them."""
        return self.n_patches * 4 * (self.n_ff + (2 if self.gated else 4) * self.width) + 12 * self.image_size**2


@dataclass(frozen=True)
class Suggestion:
    """A repository, and the published shape of its model."""

    repo: str
    quant: str
    shape: tuple[int, int, int, int, int, int]  # width, feed-forward, layers, heads, KV heads, size of a head
    n_vocab: int
    tied: bool  # one table for the embeddings and the output
    image_tokens: int  # of a picture of 1024 x 768, at most
    tower: Tower

    @property
    def name(self) -> str:
        return f"{self.repo}:{self.quant}"

    @property
    def model_bytes(self) -> int:
        n_embd, n_ff, n_layer, n_head, n_head_kv, head = self.shape
        block = 2 * n_embd * head * (n_head + n_head_kv) + 3 * n_embd * n_ff
        tables = self.n_vocab * n_embd * (1 if self.tied else 2)
        return int((n_layer * block + tables) * _BITS[self.quant] / 8)

    @property
    def mmproj_bytes(self) -> int:
        return int(self.tower.parameters * _ENCODER_BITS / 8)

    def needed(self) -> int:
        """Bytes of memory at the peak of a first question about one picture, with the default plan."""
        n_embd, n_ff, n_layer, n_head, n_head_kv, head = self.shape
        layers = tuple(Layer(i, n_head_kv, 2 * n_head_kv * head) for i in range(n_layer))
        shape = ModelShape(n_embd, n_ff, n_head, self.n_vocab, 4096, layers, head)
        weights = Weights(self.model_bytes, self.model_bytes, 0)
        files = Files(shape, weights, process_bytes(2 * self.n_vocab), self.mmproj_bytes, self.tower.compute)
        return footprint(files, Request(default_plan(), 1, self.image_tokens, _TEXT_TOKENS)).peak_prefill

    def as_json(self, available: int | None) -> dict[str, Any]:
        """available: bytes of memory on this machine. Every figure is about right."""
        needed = self.needed()
        return {
            "name": self.name,
            "model_bytes": self.model_bytes,
            "mmproj_bytes": self.mmproj_bytes,
            "needed_bytes": needed,
            "fits": None if available is None else needed <= available,
            "approximate": True,
            "run": False,
        }


_SIGLIP_BASE = Tower(768, 3072, 12, 1024, 512, 8_500_000)
_SIGLIP_384 = Tower(1152, 4304, 27, 729, 384, 22_800_000)
_SIGLIP_896 = Tower(1152, 4304, 27, 4096, 896, 8_400_000)
_QWEN25 = Tower(1280, 3420, 32, 3996, 887, 38_200_000, gated=True)

# SmolVLM cuts a picture into at most 16 tiles and shows the whole beside them: 64 tokens each, 81 of the larger one
SUGGESTIONS = (
    Suggestion("ggml-org/SmolVLM-256M-Instruct-GGUF", "Q8_0", (576, 1536, 30, 9, 3, 64), 49280, False, 17 * 64,
               _SIGLIP_BASE),
    Suggestion("ggml-org/SmolVLM-500M-Instruct-GGUF", "Q8_0", (960, 2560, 32, 15, 5, 64), 49280, False, 17 * 64,
               _SIGLIP_BASE),
    Suggestion("ggml-org/SmolVLM2-2.2B-Instruct-GGUF", "Q4_K_M", (2048, 8192, 24, 32, 32, 64), 49280, False, 17 * 81,
               _SIGLIP_384),
    Suggestion("ggml-org/Qwen2.5-VL-3B-Instruct-GGUF", "Q4_K_M", (2048, 11008, 36, 16, 2, 128), 151936, True, 999,
               _QWEN25),
    Suggestion("ggml-org/gemma-3-4b-it-GGUF", "Q4_K_M", (2560, 10240, 34, 8, 4, 256), 262208, True, 256, _SIGLIP_896),
)  # fmt: skip
