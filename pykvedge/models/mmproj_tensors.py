"""Checks the tensors of an mmproj against its metadata.

llama.cpp refuses a file that lacks a required tensor. But it treats most tensors as optional, because some projectors
have none; its graph then reads through a null pointer or asserts on a shape. The rules here follow its graphs
(tools/mtmd/models): every block of towers that are a plain transformer, and the first and last parts of the common
towers. The tensors of other projectors are not checked. No file is refused that could run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gguf import GGMLQuantizationType

from pykvedge.models.gguf import Header
from pykvedge.models.mmproj_values import Tower, bad

# towers whose blocks clip_graph::build_vit builds
_PLAIN = frozenset(
    {"dots_ocr", "gemma3", "gemma4v", "glm4v", "glm5v", "hunyuanvl", "idefics3", "internvl", "janus_pro", "kimik25",
     "kimivl", "lfm2", "lightonocr", "ling3vl", "llama4", "minimax_m3", "nemotron_v2_vl", "paddleocr", "phi4",
     "pixtral", "resampler", "step3vl"}
)  # fmt: skip
_PLACED = frozenset(  # plain towers that always read a table of positions
    {"gemma4v", "kimik25", "kimivl", "lfm2", "ling3vl", "llama4", "nemotron_v2_vl", "paddleocr", "phi4", "resampler",
     "step3vl"}
)  # fmt: skip
_LLAVA = frozenset({"mlp", "ldp", "ldpv2", "adapter"})  # clip_graph_llava: no fused weights, no grouped heads
_QWEN = frozenset({"qwen2vl_merger", "qwen2.5vl_merger", "qwen2.5o"})  # every matrix has a bias
_QWEN3 = frozenset({"qwen3vl_merger"})  # fused weights with a bias
# older converters swapped `up` and `down` in these towers' files
_MAY_BE_SWAPPED = _LLAVA | _QWEN | {"gemma3", "idefics3", "resampler"}
_FIXED_SIZE = _LLAVA | {"gemma3", "idefics3", "internvl"}  # every image or image piece has the tower's fixed size

_VECTOR = (GGMLQuantizationType.F32,)
_KERNEL = (*_VECTOR, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_WHOLE_NUMBERS = range(24, 29)  # integers and doubles, which ggml cannot multiply


class _Check:
    """Checks the tensors of one file. Each method raises ModelError for a tensor that does not fit."""

    def __init__(self, header: Header, tower: Tower) -> None:
        self.header, self.tower = header, tower

    def has(self, name: str) -> bool:
        return name in self.header.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns four dimensions of a required tensor, the fastest first."""
        tensor = self.header.tensors.get(name)
        if tensor is None:
            raise bad(self.header, f"the tensor {name} is missing")
        return (*tensor.shape, 1, 1, 1, 1)[:4]

    def tensor(self, name: str, *wanted: int | None, types: Sequence[GGMLQuantizationType] = ()) -> tuple[int, ...]:
        """Checks a tensor and returns its four dimensions. wanted: the first dimensions, None: any; others are 1."""
        shape = self.shape(name)
        right = tuple(n if want is None else want for n, want in zip(shape, wanted, strict=False))
        if shape != (*right, 1, 1, 1, 1)[:4]:
            shown, right_one = (" x ".join(map(str, one)) for one in (self.header.tensors[name].shape, right))
            raise bad(self.header, f"the tensor {name} has shape {shown}, but the metadata require {right_one}")
        if types and self.header.tensors[name].type not in types:
            raise bad(self.header, f"the tensor {name} is not of type {' or '.join(one.name for one in types)}")
        return shape

    def matrix(self, name: str, n_in: int, n_out: int | None = None) -> int:
        """Checks a matrix that multiplies vectors of n_in. Returns the width of the products."""
        width = self.tensor(name, n_in, n_out)[1]
        if self.header.tensors[name].type in _WHOLE_NUMBERS:
            raise bad(self.header, f"the tensor {name} has integers or doubles")
        return width

    def vector(self, name: str, width: int) -> None:
        """Checks a vector that is added to, or multiplied with, vectors of this width."""
        n = self.shape(name)[0]
        self.tensor(name, n if n > 0 and width % n == 0 else width, types=_VECTOR)

    def any_vectors(self, width: int, *names: str) -> None:
        for name in filter(self.has, names):
            self.vector(name, width)

    def positions(self, least: int, looked_up: bool = False) -> None:
        """Checks the table of positions. It is added whole, or looked up row by row; a looked-up table has any type."""
        name = "v.position_embd.weight"
        enough = looked_up and self.shape(name)[1] >= least
        self.tensor(name, self.tower.n_embd, None if enough else least, types=() if looked_up else _VECTOR)

    def linear(self, name: str, n_in: int, n_out: int | None = None, biased: bool = False) -> int:
        """Checks a matrix and its bias, which is optional unless `biased`. Returns the width of the result."""
        width = self.matrix(f"{name}.weight", n_in, n_out)
        if biased or self.has(f"{name}.bias"):
            self.vector(f"{name}.bias", width)
        return width

    def norms(self, width: int, *names: str) -> None:
        self.any_vectors(width, *(f"{name}.{part}" for name in names for part in ("weight", "bias")))

    def chain(self, width: int, *names: str) -> int:
        """Checks a chain of matrices with biases. Returns the width of the last result."""
        for name in names:
            width = self.linear(name, width, biased=True)
        return width

    def patches(self, *names: str) -> None:
        patch, n_embd = self.tower.patch_size, self.tower.n_embd
        for name in names or ("v.patch_embd.weight",):
            self.tensor(name, patch, patch, 3, n_embd, types=_KERNEL)
        self.any_vectors(n_embd, "v.patch_embd.bias")


def check_tensors(header: Header, tower: Tower) -> None:
    """Raises ModelError if a tensor is missing, or has another shape or type than llama.cpp's graph expects."""
    check, kind = _Check(header, tower), tower.projector
    if kind not in _PLAIN | _LLAVA | _QWEN | _QWEN3:
        return
    if tower.n_layer < 1:
        raise bad(header, "clip.vision.block_count is 0")
    if kind in _FIXED_SIZE and tower.patches < 1:
        raise bad(header, f"its images of {tower.image_size} pixels are smaller than its patches of {tower.patch_size}")
    if kind in _QWEN | _QWEN3 and tower.head % 4:
        raise bad(header, f"its head size {tower.head} is not a multiple of 4")
    check.norms(tower.n_embd, "v.pre_ln", "v.post_ln")
    check.shape("v.patch_embd.weight")
    if kind in _PLACED:
        check.shape("v.position_embd.weight")
    for layer in range(tower.n_layer):
        _check_block(check, f"v.blk.{layer}.")
    if kind in _ENDS:
        _ENDS[kind](check)


def _check_block(check: _Check, block: str) -> None:
    tower, kind = check.tower, check.tower.projector
    n_embd, q, plain = tower.n_embd, tower.n_head * tower.head, kind in _PLAIN
    kv = tower.n_head_kv * tower.head if plain else q
    fused = kind in _QWEN3 or (plain and check.has(f"{block}attn_qkv.weight"))
    for name, width in [("qkv", 3 * q)] if fused else [("q", q), ("k", kv), ("v", kv)]:
        check.linear(f"{block}attn_{name}", n_embd, width, biased=kind in _QWEN | _QWEN3)
    for name, width in (("q", q), ("k", kv)):
        norm = f"{block}attn_{name}_norm.weight"
        if plain and check.has(norm):
            check.vector(norm, tower.head if fused or check.shape(norm)[0] == tower.head else width)
    check.linear(f"{block}attn_out", q, n_embd)
    check.norms(n_embd, f"{block}ln1", f"{block}ln2")
    if plain:
        others = ("ls1", "ls2", "out_scale", "attn_post_norm", "ffn_post_norm")
        check.any_vectors(n_embd, *(f"{block}{name}.weight" for name in others))
    up, down = f"{block}ffn_up", f"{block}ffn_down"
    if kind in _MAY_BE_SWAPPED and check.shape(f"{down}.weight")[0] == n_embd:
        up, down = down, up
    width = check.linear(up, n_embd)
    if check.has(f"{block}ffn_gate.weight"):
        check.linear(f"{block}ffn_gate", n_embd, width)
    check.linear(down, width, n_embd)


# ---------------------------------------------------------------------------------------------------
# The parts before and after the blocks


def _check_llava_tower(check: _Check) -> None:
    tower, own = check.tower, check.has("v.class_embd")
    check.patches()
    if own and check.shape("v.class_embd")[0] != tower.n_embd:
        raise bad(check.header, f"the width of the tensor v.class_embd is not {tower.n_embd}")
    check.any_vectors(tower.n_embd, "v.class_embd")
    check.positions(tower.patches**2 + own, looked_up=True)


def _check_mlp(check: _Check) -> None:
    _check_llava_tower(check)
    width = check.tower.n_embd * check.tower.stacked
    if not check.has("mm.3.weight"):
        check.chain(width, "mm.0", "mm.2")
        return
    for name, norm in (("mm.0", "mm.1"), ("mm.3", "mm.4")):  # Yi has norms
        width = check.chain(width, name)
        for part in ("weight", "bias"):
            check.vector(f"{norm}.{part}", width)


def _check_ldp(check: _Check) -> None:
    _check_llava_tower(check)
    tower = check.tower
    if tower.patches != 24:
        raise bad(check.header, f"its projector needs 24 patches per side, but the encoder has {tower.patches}")
    first = 0 if tower.projector == "ldpv2" else 1
    names = (f"mm.model.mlp.{first}", f"mm.model.mlp.{first + 2}")
    width = check.chain(tower.n_embd * tower.stacked, *names)
    if tower.projector == "ldpv2":
        check.tensor("mm.model.peg.0.weight", 3, 3, 1, width, types=_KERNEL)
        check.vector("mm.model.peg.0.bias", width)


def _check_qwen(check: _Check) -> None:
    tower, third = check.tower, check.tower.projector in _QWEN3
    if check.header.values.get("clip.vision.spatial_merge_size", 2) != 2:
        raise bad(check.header, "clip.vision.spatial_merge_size must be 2, because its projector merges 2 x 2 patches")
    if check.has("v.class_embd"):
        raise bad(check.header, "its projector does not use the tensor v.class_embd")
    if check.has("v.patch_embd.bias") != third:
        raise bad(check.header, f"the tensor v.patch_embd.bias {'is missing' if third else 'is not allowed'}")
    check.patches("v.patch_embd.weight", "v.patch_embd.weight.1")
    if third:
        check.positions(max(math.isqrt(check.shape("v.position_embd.weight")[1]), 1) ** 2)
    width = check.chain(4 * tower.n_embd, "mm.0", "mm.2")
    if check.header.values.get("clip.vision.n_wa_pattern") and not third and width != tower.n_out:
        raise bad(check.header, f"clip.vision.projection_dim is {tower.n_out}, but its embeddings have width {width}")


def _check_gemma3(check: _Check) -> None:
    tower, merge = check.tower, check.tower.merge or 4
    check.patches()
    check.positions(tower.patches**2)
    if not 1 <= merge <= tower.patches:
        raise bad(check.header, f"its projector merges {merge} patches per side, but the encoder has {tower.patches}")
    check.vector("mm.soft_emb_norm.weight", tower.n_embd)
    check.tensor("mm.input_projection.weight", None, tower.n_embd)


def _check_idefics3(check: _Check) -> None:
    check.patches()
    check.positions(check.tower.patches**2)
    check.matrix("mm.model.fc.weight", check.tower.n_embd * (check.tower.merge or 1) ** 2)


def _check_internvl(check: _Check) -> None:
    tower, merge = check.tower, check.tower.merge or 1
    check.vector("v.class_embd", tower.n_embd)
    check.patches()
    check.positions(tower.patches**2 + 1)
    if tower.patches % merge:
        raise bad(
            check.header,
            f"its {tower.patches} patches per side are not a multiple of {merge}, the number of merged patches",
        )
    check.norms(tower.n_embd * merge**2, "mm.model.mlp.0")
    check.chain(tower.n_embd * merge**2, "mm.model.mlp.1", "mm.model.mlp.3")


_ENDS: dict[str, Callable[[_Check], None]] = {
    "mlp": _check_mlp,
    "adapter": _check_llava_tower,
    "gemma3": _check_gemma3,
    "idefics3": _check_idefics3,
    "internvl": _check_internvl,
    **dict.fromkeys(("ldp", "ldpv2"), _check_ldp),
    **dict.fromkeys(_QWEN | _QWEN3, _check_qwen),
}
