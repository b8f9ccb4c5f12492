"""The shapes of real vision-language models, from their published configurations."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import tokens
from .layers import TextSpec
from .released import Released
from .vit import VisionSpec
from .writer import Value


@dataclass(frozen=True)
class Shape:
    """A model and its vision tower, with their name."""

    about: str
    text: Callable[[], TextSpec]
    vision: VisionSpec
    image_tokens: str
    released: Released | None = None  # vocabulary and template; None: made-up ones


def _clip_large(projector: str, n_out: int, name: str) -> VisionSpec:
    return VisionSpec(projector, 336, 14, 1024, 24, 16, 4096, n_out, name=name)


def _llama(name: str, layers: int, heads: int, ff: int, context: int) -> TextSpec:
    return TextSpec("llama", tokens.spm(32000), layers, heads, heads, 128, ff, context, f"{name} shape")


def _text(name: str, arch: str, layers: int, heads: tuple[int, int, int], ff: int, vocab: int, **more: Any) -> TextSpec:
    """heads: query heads, KV heads and head size. The vocabulary has the family's size; its words are made up."""
    made = tokens.bpe(vocab, used=min(vocab, 151657))  # Qwen's matrices are padded to 151936
    common = {"tied": True, "eps": 1e-6, "rope_base": 1e6, **more}
    return TextSpec(arch, made, layers, *heads, ff, 32768, f"{name} shape", **common)


_QWEN_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_SMOL_TILES = tuple(f"<row_{y}_col_{x}>" for y in range(1, 7) for x in range(1, 7))
_SMOL_WORDS = ("<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<global-img>", "<image>", *_SMOL_TILES)
_LFM2_TILES = tuple(f"<|img_row_{y}_col_{x}|>" for y in range(1, 11) for x in range(1, 11))
_LFM2_WORDS = ("<|im_start|>", "<|im_end|>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *_LFM2_TILES)
_GEMMA_META: dict[str, Value] = {
    "gemma3.attention.sliding_window": 1024, "gemma3.attention.sliding_window_pattern": 6,
    "gemma3.rope.freq_base_swa": 10000.0, "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0,
}  # fmt: skip
_LFM2_ATTENDS = {"lfm2.attention.head_count_kv": [8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16)]}
_WINDOWS: dict[str, Value] = {"clip.vision.n_wa_pattern": 8}
_TILES: dict[str, Value] = {"clip.vision.preproc_image_size": 2048}


def _tower(
    projector: str, size: tuple[int, int], blocks: tuple[int, int, int, int], n_out: int, **more: Any
) -> VisionSpec:
    """size: pixels of the image and of a patch. blocks: width, number, heads and feed-forward width."""
    return VisionSpec(projector, *size, *blocks, n_out, **{"eps": 1e-6, **more})


SHAPES: dict[str, Shape] = {
    "llava-1.4b": Shape(
        "LLaVA-1.5's tower on a 1.4 B Llama with as many key as query heads",
        lambda: _llama("LLaVA-1.4B", 24, 16, 5632, 8192),  # MobileLLaMA with a context for long prompts
        _clip_large("mlp", 2048, "LLaVA-1.4B shape"),
        "576",
    ),
    "llava-1.5-7b": Shape(
        "LLaVA-1.5 7B: Vicuna 7B and CLIP ViT-L/14 at 336 pixels",
        lambda: _llama("LLaVA-1.5-7B", 32, 32, 11008, 4096),
        _clip_large("mlp", 4096, "LLaVA-1.5-7B shape"),
        "576",
    ),
    "mobilevlm-1.7b": Shape(
        "MobileVLM V2 1.7B: MobileLLaMA 1.4B and CLIP ViT-L/14 with the LDPv2 projector",
        lambda: replace(_llama("MobileLLaMA-1.4B", 24, 16, 5632, 2048), eps=1e-6),
        _clip_large("ldpv2", 2048, "MobileVLM-V2-1.7B shape"),
        "144",
    ),
    "qwen2-vl-2b": Shape(
        "Qwen2-VL 2B: grouped queries (12 to 2), M-RoPE, any image size",
        lambda: _text("Qwen2-VL-2B", "qwen2vl", 28, (12, 2, 128), 8960, 151936),
        VisionSpec("qwen2vl_merger", 560, 14, 1280, 32, 16, 5120, 1536, name="Qwen2-VL-2B shape", eps=1e-6),
        "8 to 4096",
    ),
    "smolvlm-500m": Shape(
        "SmolVLM 500M: SmolLM2 360M, 15 query heads on 5, and SigLIP base with tiles",
        lambda: _text("SmolVLM 500M", "llama", 32, (15, 5, 64), 2560, 49280, tied=False, eps=1e-5, rope_base=1e5),
        _tower("idefics3", (512, 16), (768, 12, 12, 3072), 960, merge=4, meta=_TILES),
        "64 a tile",
        Released("starcoder", "HuggingFaceTB-SmolLM3-3B", _SMOL_WORDS, end="<|im_end|>"),
    ),
    "qwen2.5-vl-3b": Shape(
        "Qwen2.5-VL 3B: 16 query heads on 2, M-RoPE, a tower with windows",
        lambda: _text("Qwen2.5-VL 3B", "qwen2vl", 36, (16, 2, 128), 11008, 151936),
        _tower("qwen2.5vl_merger", (560, 14), (1280, 32, 16, 3420), 2048, meta=_WINDOWS),
        "8 to 4096",
        Released("qwen2", "Qwen-Qwen2.5-7B-Instruct", _QWEN_WORDS, own=True, end="<|im_end|>"),
    ),
    "qwen3-vl-2b": Shape(
        "Qwen3-VL 2B: normed queries and keys, M-RoPE, features for three layers",
        lambda: _text("Qwen3-VL 2B", "qwen3vl", 28, (16, 8, 128), 6144, 151936, rope_base=5e6,
                      meta={"qwen3vl.n_deepstack_layers": 3}),
        _tower("qwen3vl_merger", (768, 16), (1024, 24, 16, 4096), 2048, deepstack=(5, 11, 17)),
        "8 to 4096",
        Released("qwen2", "Qwen-Qwen3-0.6B", _QWEN_WORDS, own=True, end="<|im_end|>"),
    ),
    "gemma-3-4b": Shape(
        "Gemma 3 4B: 8 query heads of 256 on 4, windows of 1024 in five layers of six, SigLIP on 896 pixels",
        lambda: _text("Gemma 3 4B", "gemma3", 34, (8, 4, 256), 10240, 262208, width=2560, meta=_GEMMA_META),
        _tower("gemma3", (896, 14), (1152, 27, 16, 4304), 2560, merge=4),
        "256",
        Released("gemma-4", "google-gemma-4-31B-it", ("<start_of_image>", "<end_of_image>")),
    ),
    "internvl3-1b": Shape(
        "InternVL 3 1B: Qwen2.5 0.5B, 14 query heads of 64 on 2, and InternViT 300M with tiles",
        lambda: _text("InternVL 3 1B", "qwen2", 24, (14, 2, 64), 4864, 151936),
        _tower("internvl", (448, 14), (1024, 24, 16, 4096), 896),
        "256 a tile",
        Released("qwen2", "Qwen-Qwen2.5-7B-Instruct", ("<img>", "</img>", "<IMG_CONTEXT>"), own=True, end="<|im_end|>"),
    ),
    "lfm2-vl-1.6b": Shape(
        "LFM2-VL 1.6B: convolutions, and attention in six of 16 layers",
        lambda: _text("LFM2-VL 1.6B", "lfm2", 16, (32, 8, 64), 8192, 65536, eps=1e-5, meta=_LFM2_ATTENDS),
        _tower("lfm2", (256, 16), (1152, 26, 16, 4304), 2048),
        "64 to 256 a tile",
        Released("llama-bpe", "LFM2-8B-A1B", _LFM2_WORDS, end="<|im_end|>"),
    ),
    "pixtral-12b": Shape(
        "Pixtral 12B: Mistral Nemo, 32 query heads of 128 on 8 beside a width of 5120",
        lambda: _text("Pixtral 12B", "llama", 40, (32, 8, 128), 14336, 131072, tied=False, eps=1e-5, width=5120),
        _tower("pixtral", (1024, 16), (1024, 24, 16, 4096), 5120, merge=1, eps=1e-5),
        "a token a patch",
        Released("llama-bpe", "Mistral-Small-3.2-24B-Instruct-2506", ("[INST]", "[/INST]", "[IMG]", "[IMG_END]", "</s>",
                 "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), end="</s>"),
    ),
}
