"""Checks the metadata of an mmproj, because llama.cpp's clip.cpp asserts on unexpected values.

A value of another type ends the process when the file is loaded (gguf_get_val_u32 and similar functions). A head count
that does not divide the width, or an epsilon that is no number, ends the process at the first image. A huge block count
takes all memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pykvedge.errors import ModelError
from pykvedge.models.gguf import Header

_U32, _I32, _F32, _BOOL, _STRING = 4, 5, 6, 7, 8  # GGUF's type numbers of metadata
_NAMES = {_U32: "an unsigned number of 32 bits", _I32: "a number of 32 bits", _F32: "a 32-bit float",
          _BOOL: "true or false", _STRING: "text"}  # fmt: skip

# keys that clip.cpp reads -> the only type that it accepts
_SCALARS = {
    "general.name": _STRING,
    "general.description": _STRING,
    "clip.projector_type": _STRING,
    "clip.vision.projector_type": _STRING,
    "clip.audio.projector_type": _STRING,
    "clip.vision.mm_patch_merge_type": _STRING,
    "clip.has_vision_encoder": _BOOL,
    "clip.has_audio_encoder": _BOOL,
    "clip.has_gen_audio_encoder": _BOOL,
    "clip.use_gelu": _BOOL,
    "clip.use_silu": _BOOL,
    "clip.vision.swiglu_clamp": _F32,
    "clip.vision.attention.layer_norm_epsilon": _F32,
    "clip.audio.attention.layer_norm_epsilon": _F32,
    "clip.minicpmv_version": _I32,
    "clip.minicpmv_query_num": _U32,
}
_COUNTS = (
    "embedding_length", "feed_forward_length", "block_count", "projection_dim", "attention.head_count",
    "attention.head_count_kv", "attention.head_dim", "image_size", "image_min_pixels", "image_max_pixels",
    "preproc_min_tiles", "preproc_max_tiles", "preproc_image_size", "patch_size", "projector.scale_factor",
    "projector.query_side", "projector.window_side", "spatial_merge_size", "n_wa_pattern", "window_size",
    "sam.head_count", "sam.block_count", "sam.embedding_length", "expert_used_count", "num_mel_bins",
    "projector.stack_factor", "chunk_size", "conv_kernel_size", "max_pos_emb", "projector.downsample_rate",
    "projector.head_count", "rvq.num_quantizers", "local_block_count", "local_group_size", "subsampling_factor",
)  # fmt: skip
_SCALARS |= {f"clip.{tower}.{name}": _U32 for tower in ("vision", "audio") for name in _COUNTS}
_SCALARS["clip.audio.projector.window_size"] = _U32
_ARRAYS = {"clip.vision.image_mean": _F32, "clip.vision.image_std": _F32}

_MAX_LAYERS, _LARGEST_IMAGE, _LARGEST_PATCH = 4096, 8192, 65535
_LARGEST_TOKEN = 724  # side of one token in pixels: clip.cpp counts the pixels of 4,096 tokens in 31 bits


@dataclass(frozen=True)
class Tower:
    """The numbers of a vision tower that determine the shapes of its tensors."""

    projector: str
    n_embd: int
    n_head: int
    n_head_kv: int
    head: int  # size of one head
    n_layer: int
    image_size: int
    patch_size: int
    merge: int  # projector.scale_factor: patches per side that become one token; 0: not given
    n_out: int  # projection_dim, which most projectors ignore
    stacked: int  # number of layers whose outputs the projector reads side by side

    @property
    def patches(self) -> int:
        """The patches per side of an image of the tower's size."""
        return self.image_size // self.patch_size


def bad(header: Header, what: str) -> ModelError:
    """Returns the error for an mmproj that cannot be used."""
    return ModelError(f"{header.path} cannot be used as an image encoder: {what}; download or convert it again")


def projector(header: Header) -> str:
    """Returns llama.cpp's name of an mmproj's projector type; "" if the file does not say it."""
    values = header.values
    return str(values.get("clip.projector_type") or values.get("clip.vision.projector_type") or "")


def read_tower(header: Header) -> Tower:
    """Reads the numbers of the vision tower. Raises ModelError for metadata on which llama.cpp would assert."""
    _check_types(header)
    _check_floats(header)
    n_embd, n_head = _count(header, "embedding_length", 1), _count(header, "attention.head_count", 0)
    n_head_kv = _count(header, "attention.head_count_kv", 0, default=n_head)
    head = _count(header, "attention.head_dim", 0, default=0)
    n_layer = _count(header, "block_count", 0, _MAX_LAYERS)
    _count(header, "feed_forward_length", 0)
    if n_layer and not n_head:
        raise bad(header, "clip.vision.attention.head_count is 0")
    if n_layer and n_head_kv and n_head % n_head_kv:
        raise bad(header, f"its {n_head} attention heads are not a multiple of its {n_head_kv} KV heads")
    if n_layer and not head and n_embd % n_head:
        raise bad(header, f"its width {n_embd} is not a multiple of its {n_head} attention heads")
    features = {layer for layer in header.lists.get("clip.vision.feature_layer", []) if isinstance(layer, int)}
    if any(layer > n_layer for layer in features):
        raise bad(header, f"clip.vision.feature_layer names a layer above its {n_layer} layers")
    patch = _count(header, "patch_size", 1, _LARGEST_PATCH)
    return Tower(
        projector(header), n_embd, n_head, n_head_kv, head or n_embd // max(n_head, 1), n_layer,
        _count(header, "image_size", 0, _LARGEST_IMAGE), patch,
        _merged(header, patch), _count(header, "projection_dim", 0), max(1, sum(layer >= 0 for layer in features)),
    )  # fmt: skip


def _merged(header: Header, patch: int) -> int:
    """Returns the scale factor: patches per side that become one token. clip.cpp divides image sizes by it."""
    merges = {name: _count(header, name, 1, default=1) for name in ("projector.scale_factor", "spatial_merge_size")}
    for name, merge in merges.items():
        if merge > 1 and merge * patch > _LARGEST_TOKEN:
            raise bad(
                header,
                f"clip.vision.{name} is {merge}, so each token covers {merge * patch} pixels per side, "
                f"which is too large",
            )
    return merges["projector.scale_factor"] if "clip.vision.projector.scale_factor" in header.values else 0


def _check_types(header: Header) -> None:
    for key, wanted in _SCALARS.items():
        if key in header.arrays or header.types.get(key, wanted) != wanted:
            raise bad(header, f"{key} is not {_NAMES[wanted]}")
    for key, wanted in _ARRAYS.items():
        if key in header.values or header.types.get(key, wanted) != wanted:
            raise bad(header, f"{key} is not a list of 32-bit floats")


def _check_floats(header: Header) -> None:
    key = "clip.vision.attention.layer_norm_epsilon"
    eps = header.values.get(key)
    if not isinstance(eps, float) or not 0 <= eps < math.inf:
        raise bad(header, f"{key} must be a number that is not negative, not {eps}")
    for key in _ARRAYS:
        numbers = header.lists.get(key, [])
        if len(numbers) < 3 or not all(math.isfinite(number) for number in numbers[:3]):  # type: ignore[arg-type]
            raise bad(header, f"{key} must be three numbers, one per colour")
    if 0 in header.lists["clip.vision.image_std"][:3]:
        raise bad(header, "clip.vision.image_std has a 0, and pixels cannot be divided by 0")


def _count(header: Header, name: str, least: int, most: int = 2**31 - 1, default: int | None = None) -> int:
    key = f"clip.vision.{name}"
    found = header.values.get(key, default)
    if not isinstance(found, int):
        raise bad(header, f"{key} is missing")
    if not least <= found <= most:
        raise bad(header, f"{key} is {found}; it must be from {least} to {most}")
    return found
