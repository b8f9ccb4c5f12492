"""The tensors of an mmproj are checked against its metadata: what clip.cpp asks for only if it is there, but then uses.

llama.cpp refuses a file that lacks a tensor which it calls required. It calls most of them optional, since other
projectors do without, and its graph then reads through a null pointer or asserts on a shape. The rules here are those
of its graphs (tools/mtmd/models): every block of towers that are a plain transformer, and the ends of the common ones.
Of projectors that are not listed only the metadata are checked; nothing is refused that could run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gguf import GGMLQuantizationType

from pykvedge.models.gguf import Header
from pykvedge.models.mmproj_values import Tower, bad

# towers whose blocks are built by clip_graph::build_vit
_PLAIN = frozenset(
    {"dots_ocr", "gemma3", "gemma4v", "glm4v", "glm5v", "hunyuanvl", "idefics3", "internvl", "janus_pro", "kimik25",
     "kimivl", "lfm2", "lightonocr", "ling3vl", "llama4", "minimax_m3", "nemotron_v2_vl", "paddleocr", "phi4",
     "pixtral", "resampler", "step3vl"}
)  # fmt: skip
_PLACED = frozenset(  # those of them that read a table of positions, whether it is there or not
    {"gemma4v", "kimik25", "kimivl", "lfm2", "ling3vl", "llama4", "nemotron_v2_vl", "paddleocr", "phi4", "resampler",
     "step3vl"}
)  # fmt: skip
_LLAVA = frozenset({"mlp", "ldp", "ldpv2", "adapter"})  # clip_graph_llava: no fused weights, no grouped heads
_QWEN = frozenset({"qwen2vl_merger", "qwen2.5vl_merger", "qwen2.5o"})  # and these want every bias
_QWEN3 = frozenset({"qwen3vl_merger"})  # fused weights with a bias
# of older converters, whose up and down are the other way round
_MAY_BE_SWAPPED = _LLAVA | _QWEN | {"gemma3", "idefics3", "resampler"}
_FIXED_SIZE = _LLAVA | {"gemma3", "idefics3", "internvl"}  # every image, or piece of one, has the tower's own size

_WORDS = {GGMLQuantizationType.F32: "F32", GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}
_VECTOR, _KERNEL = (GGMLQuantizationType.F32,), tuple(_WORDS)
_WHOLE_NUMBERS = range(24, 29)  # types of whole numbers and of doubles: no product takes them


class _Check:
    """This has the file and its tower, and refuses what does not fit."""

    def __init__(self, header: Header, tower: Tower) -> None:
        self.header, self.tower = header, tower

    def has(self, name: str) -> bool:
        return name in self.header.tensors

    def shape(self, name: str) -> tuple[int, int, int, int]:
        """Returns four dimensions of a tensor that must be there, the fastest first."""
        tensor = self.header.tensors.get(name)
        if tensor is None:
            raise bad(self.header, f"the tensor {name} is missing")
        first, second, third, fourth = (*tensor.shape, 1, 1, 1, 1)[:4]
        return first, second, third, fourth

    def matrix(self, name: str, n_in: int, n_out: int | None = None) -> int:
        """Checks a matrix that is multiplied by vectors of n_in, and returns the width of its products."""
        shape = self.shape(name)
        if shape[0] != n_in or shape[2:] != (1, 1) or (n_out is not None and shape[1] != n_out):
            raise self._misshapen(name, (n_in, shape[1] if n_out is None else n_out))
        if self.header.tensors[name].type in _WHOLE_NUMBERS:
            raise bad(self.header, f"the tensor {name} holds whole numbers or doubles")
        return shape[1]

    def vector(self, name: str, width: int) -> None:
        """Checks a vector that is added to, or multiplied with, vectors of this width."""
        shape = self.shape(name)
        if shape[1:] != (1, 1, 1) or shape[0] < 1 or width % shape[0]:
            raise self._misshapen(name, (width,))
        self._typed(name, _VECTOR)

    def any_vector(self, name: str, width: int) -> None:
        if self.has(name):
            self.vector(name, width)

    def kernel(self, name: str, wanted: tuple[int, int, int, int]) -> None:
        if self.shape(name) != wanted:
            raise self._misshapen(name, wanted)
        self._typed(name, _KERNEL)

    def positions(self, least: int, looked_up: bool, exact: bool) -> None:
        """Checks the table of positions. looked_up: row by row, where any type will do."""
        name = "v.position_embd.weight"
        width, n, *rest = self.shape(name)
        if width != self.tower.n_embd or rest != [1, 1] or n < least or (exact and n != least):
            raise self._misshapen(name, (self.tower.n_embd, least))
        if not looked_up:
            self._typed(name, _VECTOR)

    def linear(self, name: str, n_in: int, n_out: int | None = None, biased: bool = False) -> int:
        """Checks a matrix and its bias, which may be left out unless `biased`. Returns the width of what comes out."""
        width = self.matrix(f"{name}.weight", n_in, n_out)
        if biased or self.has(f"{name}.bias"):
            self.vector(f"{name}.bias", width)
        return width

    def norm(self, name: str, width: int) -> None:
        for part in ("weight", "bias"):
            self.any_vector(f"{name}.{part}", width)

    def _typed(self, name: str, wanted: tuple[GGMLQuantizationType, ...]) -> None:
        if self.header.tensors[name].type not in wanted:
            raise bad(self.header, f"the tensor {name} is not {' or '.join(_WORDS[one] for one in wanted)}")

    def _misshapen(self, name: str, wanted: tuple[int, ...]) -> Exception:
        shown, right = (" x ".join(map(str, shape)) for shape in (self.header.tensors[name].shape, wanted))
        return bad(self.header, f"the tensor {name} is {shown} where its metadata imply {right}")


def check_tensors(header: Header, tower: Tower) -> None:
    """Raises ModelError for a tensor that llama.cpp would miss, or that has not the shape it takes for granted."""
    check, kind = _Check(header, tower), tower.projector
    if kind not in _PLAIN | _LLAVA | _QWEN | _QWEN3:
        return
    if tower.n_layer < 1:
        raise bad(header, "clip.vision.block_count is 0")
    if kind in _FIXED_SIZE and tower.patches < 1:
        raise bad(header, f"its images of {tower.image_size} pixels are smaller than its patches of {tower.patch_size}")
    if kind in _QWEN | _QWEN3 and tower.head % 4:
        raise bad(header, f"its heads of size {tower.head} cannot be rotated, which takes a multiple of 4")
    for end in ("pre_ln", "post_ln"):
        check.norm(f"v.{end}", tower.n_embd)
    check.shape("v.patch_embd.weight")
    if kind in _PLACED:
        check.shape("v.position_embd.weight")
    for layer in range(tower.n_layer):
        _check_block(check, f"v.blk.{layer}")
    _ENDS.get(kind, lambda check: None)(check)


def _check_block(check: _Check, block: str) -> None:
    tower = check.tower
    n_embd, q, kv = tower.n_embd, tower.n_head * tower.head, tower.n_head_kv * tower.head
    fused = (check.has(f"{block}.attn_qkv.weight") and tower.projector in _PLAIN) or tower.projector in _QWEN3
    if fused:
        check.linear(f"{block}.attn_qkv", n_embd, 3 * q, biased=tower.projector in _QWEN3)
    else:
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            if tower.projector not in _PLAIN:
                width = q
            check.linear(f"{block}.attn_{name}", n_embd, width, biased=tower.projector in _QWEN)
    for name, width in (("q", q), ("k", kv)):
        if tower.projector in _PLAIN and check.has(f"{block}.attn_{name}_norm.weight"):
            per_head = check.shape(f"{block}.attn_{name}_norm.weight")[0] == tower.head
            check.vector(f"{block}.attn_{name}_norm.weight", tower.head if per_head or fused else width)
    check.linear(f"{block}.attn_out", q, n_embd)
    for name in ("ln1", "ln2"):
        check.norm(f"{block}.{name}", n_embd)
    if tower.projector in _PLAIN:
        for name in ("ls1", "ls2", "out_scale", "attn_post_norm", "ffn_post_norm"):
            check.any_vector(f"{block}.{name}.weight", n_embd)
    _check_feed_forward(check, block)


def _check_feed_forward(check: _Check, block: str) -> None:
    n_embd = check.tower.n_embd
    up, down = f"{block}.ffn_up", f"{block}.ffn_down"
    if check.tower.projector in _MAY_BE_SWAPPED and check.shape(f"{down}.weight")[0] == n_embd:
        up, down = down, up
    width = check.linear(up, n_embd)
    if check.has(f"{block}.ffn_gate.weight"):
        check.linear(f"{block}.ffn_gate", n_embd, width)
    check.linear(down, width, n_embd)


# ---------------------------------------------------------------------------------------------------
# What comes before the blocks and after them


def _check_patches(check: _Check, names: tuple[str, ...] = ("v.patch_embd.weight",)) -> None:
    for name in names:
        check.kernel(name, (check.tower.patch_size, check.tower.patch_size, 3, check.tower.n_embd))
    check.any_vector("v.patch_embd.bias", check.tower.n_embd)


def _check_chain(check: _Check, names: tuple[str, ...], width: int) -> int:
    for name in names:
        width = check.linear(name, width, biased=True)
    return width


def _check_llava_tower(check: _Check) -> None:
    tower = check.tower
    _check_patches(check)
    check.any_vector("v.class_embd", tower.n_embd)
    if check.has("v.class_embd") and check.shape("v.class_embd")[0] != tower.n_embd:
        raise bad(check.header, f"the tensor v.class_embd is not as wide as the tower, {tower.n_embd}")
    check.positions(tower.patches**2 + check.has("v.class_embd"), looked_up=True, exact=False)


def _check_mlp(check: _Check) -> None:
    _check_llava_tower(check)
    width = check.tower.n_embd * check.tower.stacked
    if not check.has("mm.3.weight"):
        _check_chain(check, ("mm.0", "mm.2"), width)
        return
    width = _check_chain(check, ("mm.0",), width)  # as of Yi: with a norm after each
    for name in ("mm.1.weight", "mm.1.bias"):
        check.vector(name, width)
    width = _check_chain(check, ("mm.3",), width)
    for name in ("mm.4.weight", "mm.4.bias"):
        check.vector(name, width)


def _check_ldp(check: _Check) -> None:
    _check_llava_tower(check)
    tower = check.tower
    if tower.patches != 24:
        raise bad(check.header, f"its projector takes 24 x 24 patches, and the tower has {tower.patches} a side")
    second = tower.projector == "ldpv2"
    names = ("mm.model.mlp.0", "mm.model.mlp.2") if second else ("mm.model.mlp.1", "mm.model.mlp.3")
    width = _check_chain(check, names, tower.n_embd * tower.stacked)
    if second:
        check.kernel("mm.model.peg.0.weight", (3, 3, 1, width))
        check.vector("mm.model.peg.0.bias", width)


def _check_qwen(check: _Check) -> None:
    tower, third = check.tower, check.tower.projector in _QWEN3
    if check.header.values.get("clip.vision.spatial_merge_size", 2) != 2:
        raise bad(check.header, "clip.vision.spatial_merge_size must be 2, as its projector joins 2 x 2 patches")
    if check.has("v.class_embd"):
        raise bad(check.header, "it has a tensor v.class_embd, which its projector takes none of")
    if check.has("v.patch_embd.bias") != third:
        raise bad(check.header, f"the tensor v.patch_embd.bias {'is missing' if third else 'does not belong there'}")
    _check_patches(check, ("v.patch_embd.weight", "v.patch_embd.weight.1"))
    if third:
        side = math.isqrt(check.shape("v.position_embd.weight")[1])
        check.positions(max(side, 1) ** 2, looked_up=False, exact=True)
    width = _check_chain(check, ("mm.0", "mm.2"), 4 * tower.n_embd)
    if check.header.values.get("clip.vision.n_wa_pattern") and tower.projector in _QWEN and width != tower.n_out:
        raise bad(check.header, f"clip.vision.projection_dim is {tower.n_out}, and its embeddings have {width}")


def _check_square(check: _Check, extra: int = 0) -> None:
    """Checks a tower that adds the table of positions as it is."""
    _check_patches(check)
    check.positions(check.tower.patches**2 + extra, looked_up=False, exact=True)


def _check_gemma3(check: _Check) -> None:
    _check_square(check)
    tower = check.tower
    if not 1 <= (tower.merge or 4) <= tower.patches:
        raise bad(check.header, f"it joins {tower.merge or 4} patches a side, and the tower has {tower.patches}")
    check.vector("mm.soft_emb_norm.weight", tower.n_embd)
    shape = check.shape("mm.input_projection.weight")
    if shape[1:] != (tower.n_embd, 1, 1):
        check.matrix("mm.input_projection.weight", shape[0], tower.n_embd)  # says what is wrong


def _check_idefics3(check: _Check) -> None:
    _check_square(check)
    check.matrix("mm.model.fc.weight", check.tower.n_embd * (check.tower.merge or 1) ** 2)


def _check_internvl(check: _Check) -> None:
    tower, merge = check.tower, check.tower.merge or 1
    check.vector("v.class_embd", tower.n_embd)
    _check_square(check, extra=1)
    if tower.patches % merge:
        raise bad(check.header, f"it joins {merge} patches a side, which {tower.patches} do not divide into")
    check.norm("mm.model.mlp.0", tower.n_embd * merge**2)
    _check_chain(check, ("mm.model.mlp.1", "mm.model.mlp.3"), tower.n_embd * merge**2)


_ENDS: dict[str, Callable[[_Check], None]] = {
    "mlp": _check_mlp,
    "ldp": _check_ldp,
    "ldpv2": _check_ldp,
    "adapter": _check_llava_tower,
    "qwen2vl_merger": _check_qwen,
    "qwen2.5vl_merger": _check_qwen,
    "qwen2.5o": _check_qwen,
    "qwen3vl_merger": _check_qwen,
    "gemma3": _check_gemma3,
    "idefics3": _check_idefics3,
    "internvl": _check_internvl,
}
