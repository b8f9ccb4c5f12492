"""mmproj files that would crash llama.cpp are refused with one line, and every working file is accepted."""

import dataclasses
import math
from pathlib import Path

import pytest
from modelgen.shapes import SHAPES
from modelgen.tiny import TinySpec
from modelgen.vision import VisionSpec, vision_model
from modelgen.writer import F16, F32, write_gguf

from pykvedge.errors import ModelError
from pykvedge.models.gguf import Header, Tensor, read_header
from pykvedge.models.mmproj_tensors import check_tensors
from pykvedge.models.mmproj_values import read_tower

SMALL = VisionSpec("mlp", 56, 14, 64, 3, 2, 128, 256)
TOWERS = {
    "mlp": SMALL,
    "ldpv2": dataclasses.replace(SMALL, projector="ldpv2", image_size=336),
    "qwen2vl_merger": dataclasses.replace(SMALL, projector="qwen2vl_merger", n_layers=2),
}
OWNERS = {"mlp": "llava", "ldpv2": "llava", "qwen2vl_merger": "qwen2vl"}


def written(folder, projector, meta=(), tensors=None, name="x.gguf"):
    """Writes an mmproj with changed metadata (None: removed), and with tensors(list) instead of its list of tensors."""
    values, own = vision_model(TOWERS[projector])
    values = {key: value for key, value in {**values, **dict(meta)}.items() if value is not None}
    path = folder / name
    write_gguf(path, values, tensors(own) if tensors else own)
    return path


def without(name):
    return lambda tensors: [t for t in tensors if t.name != name]


def changed(which, **fields):
    def change(tensor):
        new = dataclasses.replace(tensor, **fields)
        return dataclasses.replace(new, bands=((new.shape[0], 1.0),))

    return lambda tensors: [change(t) if t.name == which else t for t in tensors]


def checked(path):
    header = read_header(path)
    check_tensors(header, read_tower(header))


BLOCK = "v.blk.1."
V = "clip.vision."
BROKEN = [
    ("mlp", {}, without(BLOCK + "attn_q.weight"), "attn_q.weight is missing"),
    ("mlp", {}, without("v.patch_embd.weight"), "v.patch_embd.weight is missing"),
    ("mlp", {}, without("v.position_embd.weight"), "v.position_embd.weight is missing"),
    ("mlp", {}, without("mm.2.weight"), "mm.2.weight is missing"),
    ("mlp", {}, changed("mm.0.weight", name="mm.O.weight"), "mm.0.weight is missing"),
    ("mlp", {}, changed("mm.0.weight", shape=(256, 32)), "mm.0.weight has shape 32 x 256"),
    ("mlp", {}, changed("mm.2.bias", type=F16), "mm.2.bias is not of type F32"),
    ("mlp", {}, changed("v.class_embd", shape=(32,)), "the width of the tensor v.class_embd"),
    ("mlp", {}, changed("v.position_embd.weight", shape=(16, 64)), "v.position_embd.weight has shape 64 x 16"),
    ("mlp", {}, changed(BLOCK + "ffn_up.weight", shape=(128, 32)), "ffn_up.weight has shape 32 x 128"),
    ("mlp", {V + "attention.head_count": 3}, None, "is not a multiple of its 3 attention heads"),
    ("mlp", {V + "attention.head_count": 0}, None, "attention.head_count is 0"),
    ("mlp", {V + "attention.head_count": "two"}, None, "attention.head_count is not an unsigned number"),
    ("mlp", {V + "image_size": "56"}, None, "image_size is not an unsigned number"),
    ("mlp", {V + "image_size": 7}, None, "smaller than its patches"),
    ("mlp", {V + "image_size": 112}, None, "v.position_embd.weight"),
    ("mlp", {V + "patch_size": 14.0}, None, "patch_size is not an unsigned number"),
    ("mlp", {V + "patch_size": 0}, None, "patch_size is 0"),
    ("mlp", {V + "patch_size": 7}, None, "v.patch_embd.weight has shape 14 x 14 x 3 x 64"),
    ("mlp", {V + "block_count": 2_000_000_000}, None, "block_count is 2000000000"),
    ("mlp", {V + "block_count": None}, None, "block_count is missing"),
    ("mlp", {V + "attention.layer_norm_epsilon": math.nan}, None, "layer_norm_epsilon must be"),
    ("mlp", {V + "attention.layer_norm_epsilon": -1e-5}, None, "layer_norm_epsilon must be"),
    ("mlp", {V + "attention.layer_norm_epsilon": 1}, None, "layer_norm_epsilon is not a 32-bit float"),
    ("mlp", {V + "image_mean": [0.5, math.nan, 0.5]}, None, "image_mean"),
    ("mlp", {V + "image_std": 0.5}, None, "image_std is not a list"),
    ("mlp", {"clip.use_gelu": 1}, None, "use_gelu is not true or false"),
    ("mlp", {"clip.projector_type": 3}, None, "projector_type is not text"),
    ("mlp", {"general.name": 3}, None, "general.name is not text"),
    ("ldpv2", {}, changed("mm.model.peg.0.weight", shape=(256, 1, 5, 5)), "peg.0.weight"),
    ("ldpv2", {V + "image_size": 322}, None, "24 patches per side"),
    ("qwen2vl_merger", {}, without(BLOCK + "attn_k.bias"), "attn_k.bias is missing"),
    ("qwen2vl_merger", {}, without("v.patch_embd.weight.1"), "v.patch_embd.weight.1 is missing"),
    ("qwen2vl_merger", {}, changed("v.post_ln.bias", name="v.patch_embd.bias"), "is not allowed"),
    ("qwen2vl_merger", {V + "attention.head_count": 32}, None, "multiple of 4"),
    ("qwen2vl_merger", {V + "spatial_merge_size": 1}, None, "spatial_merge_size must be 2"),
    ("mlp", {V + "projector.scale_factor": 0}, None, "scale_factor is 0"),
    ("mlp", {V + "projector.scale_factor": 2**32 - 1}, None, "scale_factor is 4294967295"),
    ("qwen2vl_merger", {V + "spatial_merge_size": 0}, None, "spatial_merge_size is 0"),
    ("mlp", {V + "projector.scale_factor": 60}, None, "each token covers 840 pixels per side"),
]  # fmt: skip


@pytest.mark.parametrize(("projector", "meta", "tensors", "says"), BROKEN, ids=[case[-1] for case in BROKEN])
def test_what_llama_cpp_would_crash_on_is_refused(tmp_path, projector, meta, tensors, says):
    with pytest.raises(ModelError, match="cannot be used as an image encoder") as refused:
        checked(written(tmp_path, projector, meta, tensors))
    assert says in str(refused.value)


@pytest.mark.parametrize("at", [0, 10, 24, 31])
def test_chat_says_so_in_one_line(kvedge, tiny, picture_file, tmp_path, at):
    projector, meta, tensors, says = BROKEN[at]
    file = written(tmp_path, projector, meta, tensors)
    done = kvedge("chat", "--model", tiny(OWNERS[projector]).model, "--mmproj", file, "--image", picture_file(), "Hi")
    done.failed(1, says, "x.gguf")


# ------------------------------------------------------------------------------------------------- valid files


def header_of(meta, tensors):
    """Returns the header of a file with these tensors, without writing weights."""
    numbers = {bool: 7, int: 4, float: 6, str: 8}
    first = {key: value[0] if isinstance(value, list) else value for key, value in meta.items()}
    types = {key: 5 if key.endswith("feature_layer") else numbers[type(value)] for key, value in first.items()}
    lists = {key: value for key, value in meta.items() if isinstance(value, list)}
    return Header(
        Path("x.gguf"), {key: value for key, value in meta.items() if key not in lists},
        {key: len(value) for key, value in lists.items()}, lists, types,
        {t.name: Tensor(tuple(reversed(t.shape)), int(t.type), 0) for t in tensors}, 0,
    )  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_of_real_models_are_taken(name):
    header = header_of(*vision_model(SHAPES[name].vision))
    check_tensors(header, read_tower(header))


def test_the_blocks_of_other_towers_are_checked():
    """Projectors that modelgen does not make: a plain tower with grouped heads, and one with fused weights."""
    meta, tensors = vision_model(dataclasses.replace(SMALL, projector="pixtral", n_heads=4, width=64))
    grouped = {**meta, V + "attention.head_count_kv": 2}
    kv = ("attn_k.weight", "attn_v.weight", "attn_k.bias", "attn_v.bias")
    narrow = [dataclasses.replace(t, shape=(32, *t.shape[1:])) if t.name.endswith(kv) else t for t in tensors]
    fused = [
        dataclasses.replace(t, name=t.name.replace("attn_q.", "attn_qkv."), shape=(192, *t.shape[1:]))
        if ".attn_q." in t.name else t for t in tensors if ".attn_k." not in t.name and ".attn_v." not in t.name
    ]  # fmt: skip
    for values, own in ((meta, tensors), (grouped, narrow), (meta, fused)):
        header = header_of(values, own)
        check_tensors(header, read_tower(header))
        for left_out in ("v.patch_embd.weight", BLOCK + "attn_out.weight", BLOCK + "ffn_up.weight"):
            broken = header_of(values, without(left_out)(own))
            with pytest.raises(ModelError, match=f"{left_out} is missing"):
                check_tensors(broken, read_tower(broken))
    for values, own in ((meta, narrow), (grouped, tensors)):
        header = header_of(values, own)
        with pytest.raises(ModelError, match="but the metadata require"):
            check_tensors(header, read_tower(header))


@pytest.mark.parametrize("kind", ["llava", "qwen2vl"])
@pytest.mark.parametrize("shape", [{}, {"image_size": 14}, {"image_size": 112}, {"head_size": 128}, {"weight": "q8_0"}])
def test_every_tiny_mmproj_is_taken(tiny, kind, shape):
    assert set(shape) <= {field.name for field in dataclasses.fields(TinySpec)}
    checked(tiny(kind, **shape).mmproj)


@pytest.mark.parametrize("projector", TOWERS)
def test_small_towers_are_taken(tmp_path, projector):
    checked(written(tmp_path, projector))


def mutants(folder, projector, every):
    """Writes files with a removed, halved or retyped tensor, or a value of another size or type."""
    return [written(folder, projector, *change) for change in list(mutations(projector))[::every]]


def mutations(projector):
    meta, tensors = vision_model(TOWERS[projector])
    for i, tensor in enumerate(tensors):
        half = (*tensor.shape[:-1], max(1, tensor.shape[-1] // 2))
        changes = [without(tensor.name), changed(tensor.name, shape=half)]
        changes += [changed(tensor.name, type=F16)] * (tensor.type == F32)
        for j, change in enumerate(changes):
            yield {}, change, f"t{i}.{j}.gguf"
    for i, key in enumerate(key for key in meta if key.startswith("clip.")):
        for j, value in enumerate((None, "text", math.nan, 0, 1, 2**31, [1, 2])):
            yield {key: value}, None, f"v{i}.{j}.gguf"


@pytest.mark.parametrize("projector", TOWERS)
def test_whatever_is_not_refused_runs(tiny, native, picture_file, tmp_path, file_results, projector, pytestconfig):
    files = mutants(tmp_path, projector, 1 if pytestconfig.getoption("all") else 5)
    lines = file_results("mmprojs", tiny(OWNERS[projector], n_vocab=512).model, picture_file(), files=files)
    assert "ran" in lines
