"""Vision towers and projectors (mmproj files): the metadata and tensors that mtmd wants."""

from __future__ import annotations

from . import towers
from .layers import Model
from .vit import VisionSpec, block, linear, norm, patch, tower_meta
from .writer import F16, Tensor, matrix, vector

__all__ = ["VisionSpec", "vision_model"]


def _llava_projector(spec: VisionSpec) -> list[Tensor]:
    first = linear(spec, "mm.0", (spec.n_out, spec.width), 0.7)
    return [*first, *linear(spec, "mm.2", (spec.n_out, spec.n_out), 2 * spec.out_std)]


def _ldpv2_projector(spec: VisionSpec) -> list[Tensor]:
    """MobileVLM V2: the MLP, then 2x2 pooling and a depthwise convolution around which it is added."""
    n = spec.n_out
    return [
        *linear(spec, "mm.model.mlp.0", (n, spec.width), 0.7),
        *linear(spec, "mm.model.mlp.2", (n, n), 4 * spec.out_std),
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
        patch(spec, "v.patch_embd.weight"),
        vector("v.position_embd.weight", (patches + 1, n), std=0.5),
        *norm("v.pre_ln", n),
    ]
    tensors += [t for i in range(kept) for t in block(spec, i)]
    tensors += _ldpv2_projector(spec) if spec.projector == "ldpv2" else _llava_projector(spec)
    meta = tower_meta(spec, kept)
    meta["clip.vision.feature_layer"] = [kept]
    return meta, tensors


def qwen2vl_vit(spec: VisionSpec) -> Model:
    """Qwen2-VL's ViT: any image size, rotary positions, two frames per patch, 2x2 patches per token."""
    n, merged = spec.width, 4 * spec.width
    tensors = [patch(spec, "v.patch_embd.weight", 2), patch(spec, "v.patch_embd.weight.1", 2)]
    tensors += [t for i in range(spec.n_layers) for t in block(spec, i)]
    tensors += [
        *norm("v.post_ln", n),
        *linear(spec, "mm.0", (merged, merged), 1.0),
        *linear(spec, "mm.2", (spec.n_out, merged), 2 * spec.out_std),
    ]
    meta = tower_meta(spec, spec.n_layers)
    meta["clip.vision.spatial_merge_size"] = 2
    return meta, tensors


def vision_model(spec: VisionSpec) -> Model:
    known = {"qwen2vl_merger": qwen2vl_vit, **towers.TOWERS}
    return known.get(spec.projector, clip_vit)(spec)
