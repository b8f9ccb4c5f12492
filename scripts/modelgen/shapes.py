"""The shapes of real vision-language models, as their published configurations give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from . import tokens
from .text import TextSpec
from .tokens import Vocabulary
from .vit import VisionSpec


@dataclass(frozen=True)
class Shape:
    """A model and its vision tower, with what to call it."""

    about: str
    text: Callable[[], TextSpec]
    vision: VisionSpec
    image_tokens: str


def _spm() -> Vocabulary:
    return tokens.spm(32000)


def _qwen() -> Vocabulary:
    # 151657 tokens are in use, the matrices are padded to 151936.
    return tokens.bpe(151936, used=151657)


def _vicuna_7b() -> TextSpec:
    return TextSpec("llama", _spm(), 32, 32, 32, 128, 11008, 4096, "LLaVA-1.5-7B shape")


def _mobilellama() -> TextSpec:
    return TextSpec("llama", _spm(), 24, 16, 16, 128, 5632, 2048, "MobileLLaMA-1.4B shape", eps=1e-6)


def _llava_1b() -> TextSpec:
    # MobileLLaMA with a context that holds long prompts.
    return replace(_mobilellama(), n_ctx_train=8192, name="LLaVA-1.4B shape", eps=1e-5)


def _qwen2_2b() -> TextSpec:
    base = TextSpec("qwen2vl", _qwen(), 28, 12, 2, 128, 8960, 32768, "Qwen2-VL-2B shape")
    return replace(base, rope_base=1e6, eps=1e-6, tied=True)


def _clip_large(projector: str, n_out: int, name: str) -> VisionSpec:
    return VisionSpec(projector, 336, 14, 1024, 24, 16, 4096, n_out, name=name)


SHAPES: dict[str, Shape] = {
    "llava-1.4b": Shape(
        "LLaVA-1.5's tower on a 1.4 B Llama with as many key as query heads",
        _llava_1b,
        _clip_large("mlp", 2048, "LLaVA-1.4B shape"),
        "576",
    ),
    "llava-1.5-7b": Shape(
        "LLaVA-1.5 7B: Vicuna 7B and CLIP ViT-L/14 at 336 pixels",
        _vicuna_7b,
        _clip_large("mlp", 4096, "LLaVA-1.5-7B shape"),
        "576",
    ),
    "mobilevlm-1.7b": Shape(
        "MobileVLM V2 1.7B: MobileLLaMA 1.4B and CLIP ViT-L/14 with the LDPv2 projector",
        _mobilellama,
        _clip_large("ldpv2", 2048, "MobileVLM-V2-1.7B shape"),
        "144",
    ),
    "qwen2-vl-2b": Shape(
        "Qwen2-VL 2B: grouped queries (12 to 2), M-RoPE, any image size",
        _qwen2_2b,
        VisionSpec("qwen2vl_merger", 560, 14, 1280, 32, 16, 5120, 1536, name="Qwen2-VL-2B shape", eps=1e-6),
        "8 to 4096",
    ),
}
