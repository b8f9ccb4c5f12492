"""Vision towers and projectors (mmproj files), with the tensors and keys that clip.cpp reads for each."""

import math
from collections.abc import Callable

from .layers import Model
from .vit import PLAIN, Style, VisionSpec, block, linear, norm, patch, positions, tower_meta
from .writer import F16, Int32, Tensor, matrix, vector

_SCALE = "clip.vision.projector.scale_factor"
_MERGE = "clip.vision.spatial_merge_size"


def _blocks(spec: VisionSpec, style: Style = PLAIN) -> list[Tensor]:
    return [t for i in range(spec.n_layers) for t in block(spec, i, style)]


def _patch_bias(spec: VisionSpec) -> Tensor:
    return vector("v.patch_embd.bias", spec.width, std=0.1)


def _two_frames(spec: VisionSpec) -> list[Tensor]:
    return [patch(spec, "v.patch_embd.weight", 2), patch(spec, "v.patch_embd.weight.1", 2)]


def _two_linears(spec: VisionSpec, names: tuple[str, str], n_in: int, n_mid: int) -> list[Tensor]:
    return [*linear(spec, names[0], (n_mid, n_in), 1.0), *linear(spec, names[1], (spec.n_out, n_mid), 2 * spec.out_std)]


def qwen25vl(spec: VisionSpec) -> Model:
    """Qwen2.5-VL: Qwen2-VL with RMS norms, gates, and windows in every other layer."""
    blocks = _blocks(spec, Style(rms=True, gated=True))
    tensors = [*_two_frames(spec), *blocks, *norm("v.post_ln", spec.width, rms=True)]
    tensors += _two_linears(spec, ("mm.0", "mm.2"), 4 * spec.width, 4 * spec.width)
    meta = tower_meta(spec, spec.n_layers)
    return meta | {_MERGE: 2, "clip.vision.n_wa_pattern": 2, "clip.use_silu": True}, tensors


def qwen3vl(spec: VisionSpec) -> Model:
    """Qwen3-VL and Qwen3.5: positions are added and rotated; `deepstack` layers also feed the language model."""
    n, merged = spec.width, 4 * spec.width
    tensors = [*_two_frames(spec), _patch_bias(spec), positions(spec), *_blocks(spec, Style(fused=True))]
    for i in spec.deepstack:
        tensors += norm(f"v.deepstack.{i}.norm", merged)
        tensors += linear(spec, f"v.deepstack.{i}.fc1", (merged, merged), 1.0)
        tensors += linear(spec, f"v.deepstack.{i}.fc2", (spec.n_out, merged), spec.out_std)
    tensors += [*norm("v.post_ln", n), *_two_linears(spec, ("mm.0", "mm.2"), merged, merged)]
    return tower_meta(spec, spec.n_layers) | {_MERGE: 2, "clip.use_gelu": True}, tensors


def _siglip(spec: VisionSpec) -> list[Tensor]:
    first = [patch(spec, "v.patch_embd.weight"), _patch_bias(spec), positions(spec)]
    return [*first, *_blocks(spec), *norm("v.post_ln", spec.width)]


def gemma3(spec: VisionSpec) -> Model:
    """Gemma 3: SigLIP on one square image, pooled, and a projection that is stored transposed."""
    n = spec.width
    tensors = [
        *_siglip(spec),
        *norm("mm.soft_emb_norm", n, rms=True),
        matrix("mm.input_projection.weight", (n, spec.n_out), spec.out_std / math.sqrt(n), F16),
    ]
    return tower_meta(spec, spec.n_layers) | {_SCALE: spec.merge, "clip.use_gelu": True}, tensors


def internvl(spec: VisionSpec) -> Model:
    """InternVL: tiles and a thumbnail, a class token, scaled residuals."""
    n, merged = spec.width, spec.width * spec.merge**2
    tensors = [
        vector("v.class_embd", n, std=1.0),
        patch(spec, "v.patch_embd.weight"),
        _patch_bias(spec),
        positions(spec, 1),
        *_blocks(spec),
        *(vector(f"v.blk.{i}.{x}.weight", n, 1.0, 0.1) for i in range(spec.n_layers) for x in ("ls1", "ls2")),
        *norm("mm.model.mlp.0", merged),
        *_two_linears(spec, ("mm.model.mlp.1", "mm.model.mlp.3"), merged, spec.n_out),
    ]
    return tower_meta(spec, spec.n_layers) | {_SCALE: spec.merge, "clip.use_gelu": True}, tensors


def idefics3(spec: VisionSpec) -> Model:
    """Idefics 3 and SmolVLM: tiles of an image with a given longest edge; the projector is one matrix."""
    merged = spec.width * spec.merge**2
    tensors = [*_siglip(spec), *linear(spec, "mm.model.fc", (spec.n_out, merged), spec.out_std, biased=False)]
    meta = tower_meta(spec, spec.n_layers) | {_SCALE: spec.merge, "clip.use_gelu": True}
    return meta | {"clip.vision.preproc_image_size": 2 * spec.image_size}, tensors


def pixtral(spec: VisionSpec) -> Model:
    """Pixtral, and with `merge` above 1 the tower of Mistral Small 3.1: any image size, a break after each row."""
    n = spec.width
    style = Style(rms=True, gated=True, biased=False)
    tensors = [patch(spec, "v.patch_embd.weight"), *norm("v.pre_ln", n, rms=True), *_blocks(spec, style)]
    meta = tower_meta(spec, spec.n_layers) | {"clip.use_silu": True}
    if spec.merge > 1:
        meta[_MERGE] = spec.merge
        tensors += norm("mm.input_norm", n, rms=True)
        tensors += linear(spec, "mm.patch_merger", (n, n * spec.merge**2), 1.0, biased=False)
    tensors += _two_linears(spec, ("mm.1", "mm.2"), n, spec.n_out)
    return meta, [*tensors, vector("v.token_embd.img_break", spec.n_out, std=spec.out_std)]


def resampler(spec: VisionSpec) -> Model:
    """MiniCPM-V 2.6: learned queries attend to each slice; the width must be a multiple of 128."""
    n, out, queries, r = spec.width, spec.n_out, 8, "resampler"
    tensors = [
        patch(spec, "v.patch_embd.weight"),
        _patch_bias(spec),
        matrix("v.position_embd.weight", (70 * 70, n), 0.5, F16),  # row of a patch: its place in a grid of 70 x 70
        *_blocks(spec),
        *norm("v.post_ln", n),
        vector(f"{r}.pos_embed_k", (1, out), std=1.0),  # required but unused: positions are computed
        vector(f"{r}.query", (queries, out), std=1.0),
        *linear(spec, f"{r}.kv", (out, n), 1.0, biased=False),
        *(t for x in ("q", "k", "v", "out") for t in linear(spec, f"{r}.attn.{x}", (out, out), 1.5)),
        *(t for x in ("q", "kv", "post") for t in norm(f"{r}.ln_{x}", out)),
        *linear(spec, f"{r}.proj", (out, out), spec.out_std, biased=False),
    ]
    meta = tower_meta(spec, spec.n_layers) | {"clip.use_gelu": True}
    return meta | {"clip.minicpmv_version": Int32(3), "clip.minicpmv_query_num": queries}, tensors


def lfm2(spec: VisionSpec) -> Model:
    """LFM2-VL: SigLIP 2 on images of any size, 64 to 256 tokens each; large images are tiled."""
    merged = spec.width * spec.merge**2
    tensors = [*_siglip(spec), *norm("mm.input_norm", merged)]
    tensors += _two_linears(spec, ("mm.1", "mm.2"), merged, spec.n_out)
    return tower_meta(spec, spec.n_layers) | {_SCALE: spec.merge, "clip.use_gelu": True}, tensors


def glm4v(spec: VisionSpec) -> Model:
    """GLM-4.1V: two frames as in Qwen2-VL, positions added and rotated, 2 x 2 patches merged by a convolution."""
    n, out, mid = spec.width, spec.n_out, 2 * spec.n_out
    style = Style(rms=True, gated=True, biased=False, fused=True)
    tensors = [
        *_two_frames(spec),
        _patch_bias(spec),
        *norm("v.norm_embd", n, rms=True),
        positions(spec),
        *_blocks(spec, style),
        *norm("v.post_ln", n, rms=True),
        matrix("mm.patch_merger.weight", (out, n, 2, 2), 1 / math.sqrt(4 * n), F16),
        vector("mm.patch_merger.bias", out, std=0.02),
        *linear(spec, "mm.model.fc", (out, out), 1.0, biased=False),
        *norm("mm.post_norm", out),
        *(t for x in ("up", "gate") for t in linear(spec, f"mm.{x}", (mid, out), 1.5, biased=False)),
        *linear(spec, "mm.down", (out, mid), 2 * spec.out_std, biased=False),
    ]
    return tower_meta(spec, spec.n_layers) | {_MERGE: 2, "clip.use_silu": True}, tensors


def kimivl(spec: VisionSpec) -> Model:
    """Kimi-VL: MoonViT on images of any size; positions are added and rotated."""
    n, merged = spec.width, spec.width * spec.merge**2
    tensors = [*_siglip(spec), *norm("mm.input_norm", n), *_two_linears(spec, ("mm.1", "mm.2"), merged, merged)]
    return tower_meta(spec, spec.n_layers) | {_SCALE: spec.merge, "clip.use_gelu": True}, tensors


def gemma4v(spec: VisionSpec) -> Model:
    """Gemma 4: any image size, a table of positions for columns and one for rows, 3 x 3 patches pooled."""
    n, head = spec.width, spec.width // spec.n_heads
    tensors = [
        patch(spec, "v.patch_embd.weight"),
        vector("v.position_embd.weight", (2, 128, n), std=0.5),
        *_blocks(spec, Style(rms=True, gated=True, biased=False)),
    ]
    for i in range(spec.n_layers):
        for x in ("attn_q_norm", "attn_k_norm"):
            tensors.append(vector(f"v.blk.{i}.{x}.weight", head, mean=0.5, std=0.05))
        for x in ("attn_post_norm", "ffn_post_norm"):
            tensors.append(vector(f"v.blk.{i}.{x}.weight", n, mean=0.7, std=0.05))
    tensors += linear(spec, "mm.input_projection", (spec.n_out, n), spec.out_std, biased=False)
    return tower_meta(spec, spec.n_layers) | {_SCALE: spec.merge, "clip.use_gelu": True}, tensors


def llama4(spec: VisionSpec) -> Model:
    """Llama 4: square tiles and a thumbnail, a class token, a matrix for patches."""
    n, merged, pixels = spec.width, spec.width * spec.merge**2, 3 * spec.patch_size**2
    tensors = [
        vector("v.class_embd", n, std=1.0),
        matrix("v.patch_embd.weight", (n, pixels), 1.5 / math.sqrt(pixels), F16),
        positions(spec, 1),
        *norm("v.pre_ln", n),
        *_blocks(spec),
        *norm("v.post_ln", n),
        *linear(spec, "mm.model.mlp.1", (merged, merged), 1.5, biased=False),
        *linear(spec, "mm.model.mlp.2", (merged, merged), 1.5, biased=False),
        *linear(spec, "mm.model.fc", (spec.n_out, merged), 2 * spec.out_std, biased=False),
    ]
    return tower_meta(spec, spec.n_layers) | {_SCALE: spec.merge, "clip.use_gelu": True}, tensors


def _llava_projector(spec: VisionSpec) -> list[Tensor]:
    first = linear(spec, "mm.0", (spec.n_out, spec.width), 0.7)
    return [*first, *linear(spec, "mm.2", (spec.n_out, spec.n_out), 2 * spec.out_std)]


def _ldpv2_projector(spec: VisionSpec) -> list[Tensor]:
    """MobileVLM V2: the MLP, then 2x2 pooling and a depthwise convolution with a residual."""
    n = spec.n_out
    return [
        *linear(spec, "mm.model.mlp.0", (n, spec.width), 0.7),
        *linear(spec, "mm.model.mlp.2", (n, n), 4 * spec.out_std),
        matrix("mm.model.peg.0.weight", (n, 1, 3, 3), 0.1, F16),
        vector("mm.model.peg.0.bias", n, std=0.02 * spec.out_std),
    ]


def clip_vit(spec: VisionSpec) -> Model:
    """CLIP's ViT in LLaVA-1.5: the output of the last but one layer, without the class token.

    The last layer never runs, so the file does not have it; `feature_layer` counts the layers of the file.
    """
    kept = spec.n_layers - 1
    tensors = [
        vector("v.class_embd", spec.width, std=1.0),
        patch(spec, "v.patch_embd.weight"),
        positions(spec, 1),
        *norm("v.pre_ln", spec.width),
        *(t for i in range(kept) for t in block(spec, i)),
        *(_ldpv2_projector(spec) if spec.projector == "ldpv2" else _llava_projector(spec)),
    ]
    return tower_meta(spec, kept) | {"clip.vision.feature_layer": [kept]}, tensors


def qwen2vl_vit(spec: VisionSpec) -> Model:
    """Qwen2-VL's ViT: any image size, rotary positions, two frames per patch, 2x2 patches per token."""
    tensors = [*_two_frames(spec), *_blocks(spec), *norm("v.post_ln", spec.width)]
    tensors += _two_linears(spec, ("mm.0", "mm.2"), 4 * spec.width, 4 * spec.width)
    return tower_meta(spec, spec.n_layers) | {_MERGE: 2}, tensors


TOWERS: dict[str, Callable[[VisionSpec], Model]] = {
    "qwen2vl_merger": qwen2vl_vit,
    "qwen2.5vl_merger": qwen25vl,
    "qwen3vl_merger": qwen3vl,
    "gemma3": gemma3,
    "internvl": internvl,
    "idefics3": idefics3,
    "pixtral": pixtral,
    "resampler": resampler,
    "lfm2": lfm2,
    "glm4v": glm4v,
    "kimivl": kimivl,
    "gemma4v": gemma4v,
    "llama4": llama4,
}


def vision_model(spec: VisionSpec) -> Model:
    """Returns the metadata and the tensors of an mmproj file."""
    meta, tensors = TOWERS.get(spec.projector, clip_vit)(spec)
    return meta | dict(spec.meta), tensors
