"""The common parts of the vision transformers in mmproj files: blocks, patches, metadata."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gguf import GGMLQuantizationType

from .writer import F16, F32, Tensor, Value, general_meta, matrix, vector

_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
# More than one unit: the common part of a patch's pixels outweighs their differences.
_PATCH_GAIN = 1.5


@dataclass(frozen=True)
class VisionSpec:
    """The shape of a ViT and its projector. out_std: standard deviation of the output embeddings."""

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
    deepstack: tuple[int, ...] = ()  # layers whose outputs also go to the language model, as in Qwen3-VL
    merge: int = 2  # side, in patches, of the square that becomes one token, if the projector merges
    weight: GGMLQuantizationType = F16
    meta: Mapping[str, Value] = field(default_factory=dict)  # overrides the metadata of the tower


def norm(name: str, size: int, rms: bool = False) -> list[Tensor]:
    """Returns the tensors of a norm. rms: a norm without a bias."""
    weight = vector(f"{name}.weight", size, mean=1.0, std=0.05)
    return [weight] if rms else [weight, vector(f"{name}.bias", size, std=0.05)]


def linear(spec: VisionSpec, name: str, shape: tuple[int, int], gain: float, biased: bool = True) -> list[Tensor]:
    weight = matrix(f"{name}.weight", shape, gain / math.sqrt(shape[1]), spec.weight)
    return [weight, vector(f"{name}.bias", shape[0], std=0.02 * gain)] if biased else [weight]


@dataclass(frozen=True)
class Style:
    """The style of a tower's blocks: norms without bias, a gate, matrices without bias, one matrix for q, k and v."""

    rms: bool = False
    gated: bool = False
    biased: bool = True
    fused: bool = False


PLAIN = Style()


def block(spec: VisionSpec, i: int, style: Style = PLAIN) -> list[Tensor]:
    b, n, out = f"v.blk.{i}", spec.width, 1 / math.sqrt(2 * spec.n_layers)
    biased = style.biased
    return [
        *norm(f"{b}.ln1", n, style.rms),
        *_qkv(spec, b, style),
        *linear(spec, f"{b}.attn_out", (n, n), 2 * out, biased),
        *norm(f"{b}.ln2", n, style.rms),
        *linear(spec, f"{b}.ffn_up", (spec.n_ff, n), 1.0, biased),
        *(linear(spec, f"{b}.ffn_gate", (spec.n_ff, n), 1.0, biased) if style.gated else []),
        *linear(spec, f"{b}.ffn_down", (n, spec.n_ff), 2 * out, biased),
    ]


def _qkv(spec: VisionSpec, b: str, style: Style) -> list[Tensor]:
    n = spec.width
    if style.fused:
        return linear(spec, f"{b}.attn_qkv", (3 * n, n), 1.5, style.biased)
    gains = {"q": 1.5, "k": 1.5, "v": 1.0}
    return [t for x, gain in gains.items() for t in linear(spec, f"{b}.attn_{x}", (n, n), gain, style.biased)]


def positions(spec: VisionSpec, extra: int = 0) -> Tensor:
    """Returns a table with a row for each patch of the tower's image size, and `extra` rows."""
    patches = (spec.image_size // spec.patch_size) ** 2
    return vector("v.position_embd.weight", (patches + extra, spec.width), std=0.5)


def tower_meta(spec: VisionSpec, blocks: int) -> dict[str, Value]:
    return {
        **general_meta("clip", "mmproj", spec.name, spec.weight),
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


def patch(spec: VisionSpec, name: str, parts: int = 1) -> Tensor:
    shape = (spec.width, 3, spec.patch_size, spec.patch_size)
    std = _PATCH_GAIN / math.sqrt(parts * math.prod(shape[1:]))
    return matrix(name, shape, std, F32 if parts > 1 else F16)
