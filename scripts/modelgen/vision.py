"""Vision towers and projectors (mmproj files): the metadata and tensors that mtmd wants."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .text import Model
from .writer import F16, F32, FILE_TYPES, Tensor, Value, matrix, vector

_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
# What the pixels of one patch have in common outweighs what they differ in, hence more than one unit.
_PATCH_GAIN = 1.5


@dataclass(frozen=True)
class VisionSpec:
    """The shape of a ViT and its projector; `out_std` is the size of the embeddings it hands over."""

    projector: str
    image_size: int
    patch_size: int
    width: int
    n_layers: int
    n_heads: int
    n_ff: int
    n_out: int
    out_std: float = 1.0
    name: str = "random"
    eps: float = 1e-5
    weight: GGMLQuantizationType = F16


def _norm(name: str, size: int) -> list[Tensor]:
    return [vector(f"{name}.weight", size, mean=1.0, std=0.05), vector(f"{name}.bias", size, std=0.05)]


def _linear(spec: VisionSpec, name: str, shape: tuple[int, int], gain: float) -> list[Tensor]:
    weight = matrix(f"{name}.weight", shape, gain / math.sqrt(shape[1]), spec.weight)
    return [weight, vector(f"{name}.bias", shape[0], std=0.02 * gain)]


def _block(spec: VisionSpec, i: int) -> list[Tensor]:
    b, n, out = f"v.blk.{i}", spec.width, 1 / math.sqrt(2 * spec.n_layers)
    return [
        *_norm(f"{b}.ln1", n),
        *_linear(spec, f"{b}.attn_q", (n, n), 1.5),
        *_linear(spec, f"{b}.attn_k", (n, n), 1.5),
        *_linear(spec, f"{b}.attn_v", (n, n), 1.0),
        *_linear(spec, f"{b}.attn_out", (n, n), 2 * out),
        *_norm(f"{b}.ln2", n),
        *_linear(spec, f"{b}.ffn_up", (spec.n_ff, n), 1.0),
        *_linear(spec, f"{b}.ffn_down", (n, spec.n_ff), 2 * out),
    ]


def _meta(spec: VisionSpec, blocks: int) -> dict[str, Value]:
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": spec.name,
        "general.description": "random weights: for tests and measurements, not for answers",
        "general.file_type": FILE_TYPES[spec.weight],
        "general.quantization_version": 2,
        "clip.has_vision_encoder": True,
        "clip.projector_type": spec.projector,
        "clip.use_gelu": False,
        "clip.vision.image_size": spec.image_size,
        "clip.vision.patch_size": spec.patch_size,
        "clip.vision.embedding_length": spec.width,
        "clip.vision.feed_forward_length": spec.n_ff,
        "clip.vision.block_count": blocks,
        "clip.vision.projection_dim": spec.n_out,
        "clip.vision.attention.head_count": spec.n_heads,
        "clip.vision.attention.layer_norm_epsilon": spec.eps,
        "clip.vision.image_mean": _CLIP_MEAN,
        "clip.vision.image_std": _CLIP_STD,
    }


def _patch(spec: VisionSpec, name: str, parts: int = 1) -> Tensor:
    shape = (spec.width, 3, spec.patch_size, spec.patch_size)
    std = _PATCH_GAIN / math.sqrt(parts * math.prod(shape[1:]))
    return matrix(name, shape, std, F32 if parts > 1 else F16)


def _llava_projector(spec: VisionSpec) -> list[Tensor]:
    first = _linear(spec, "mm.0", (spec.n_out, spec.width), 0.7)
    return [*first, *_linear(spec, "mm.2", (spec.n_out, spec.n_out), 2 * spec.out_std)]


def _ldpv2_projector(spec: VisionSpec) -> list[Tensor]:
    """MobileVLM V2: the MLP, then 2x2 pooling and a depthwise convolution around which it is added."""
    n = spec.n_out
    return [
        *_linear(spec, "mm.model.mlp.0", (n, spec.width), 0.7),
        *_linear(spec, "mm.model.mlp.2", (n, n), 4 * spec.out_std),
        matrix("mm.model.peg.0.weight", (n, 1, 3, 3), 0.1, F16),
        vector("mm.model.peg.0.bias", n, std=0.02 * spec.out_std),
    ]


def clip_vit(spec: VisionSpec) -> Model:
    """CLIP's ViT as LLaVA-1.5 uses it: what comes out of the last but one layer, without the class token.

    The last layer is never run, so it is not in the file; `feature_layer` says that all those in it are.
    """
    n, kept = spec.width, spec.n_layers - 1
    patches = (spec.image_size // spec.patch_size) ** 2
    tensors = [
        vector("v.class_embd", n, std=1.0),
        _patch(spec, "v.patch_embd.weight"),
        vector("v.position_embd.weight", (patches + 1, n), std=0.5),
        *_norm("v.pre_ln", n),
    ]
    tensors += [t for i in range(kept) for t in _block(spec, i)]
    tensors += _ldpv2_projector(spec) if spec.projector == "ldpv2" else _llava_projector(spec)
    meta = _meta(spec, kept)
    meta["clip.vision.feature_layer"] = [kept]
    return meta, tensors


def qwen2vl_vit(spec: VisionSpec) -> Model:
    """Qwen2-VL's ViT: any image size, rotary positions, two frames per patch, 2x2 patches per token."""
    n, merged = spec.width, 4 * spec.width
    tensors = [_patch(spec, "v.patch_embd.weight", 2), _patch(spec, "v.patch_embd.weight.1", 2)]
    tensors += [t for i in range(spec.n_layers) for t in _block(spec, i)]
    tensors += [
        *_norm("v.post_ln", n),
        *_linear(spec, "mm.0", (merged, merged), 1.0),
        *_linear(spec, "mm.2", (spec.n_out, merged), 2 * spec.out_std),
    ]
    meta = _meta(spec, spec.n_layers)
    meta["clip.vision.spatial_merge_size"] = 2
    return meta, tensors


def vision_model(spec: VisionSpec) -> Model:
    return qwen2vl_vit(spec) if spec.projector == "qwen2vl_merger" else clip_vit(spec)
