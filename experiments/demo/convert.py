"""Writes the GGUF files of a trained model in LLaVA-1.5 style: text model (tokenizer, chat template) and mmproj."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from kvedge_lab.demo_tasks.scenes import CELL, IMAGE_SIZE

from .checkpoint import load_learner
from .text import TextConfig
from .tokenizer import BOS, CHAT_TEMPLATE, EOS, UNK, Tokenizer
from .train_text import load_tower, make_learner
from .vision import VisionConfig

TYPES = {
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}
# our name of a block's part: name in GGUF, in the order of the file
TEXT_NAMES = {"ln1": "attn_norm", "ln2": "ffn_norm", **{name: f"attn_{name}" for name in "qkv"}, "o": "attn_output",
              "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
VISION_NAMES = {"ln1": "ln1", "ln2": "ln2", **{name: f"attn_{name}" for name in "qkv"}, "o": "attn_out",
                "up": "ffn_up", "down": "ffn_down"}  # fmt: skip


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    """Adds a tensor: matrices in the file's type, vectors and position embeddings in F32, the convolution in F16."""
    data = tensor.detach().float().numpy()
    wanted = TYPES[kind][0]
    if data.ndim == 1 or "position" in name:
        wanted = gguf.GGMLQuantizationType.F32
    elif data.ndim == 4:
        wanted = gguf.GGMLQuantizationType.F16
    if wanted == gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, data.astype(np.float16))
    elif wanted == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(data))
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, wanted), raw_dtype=wanted)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def set_values(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """Adds metadata. values: {name of a GGUFWriter method without "add_": value}."""
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)


def about(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "file_type": TYPES[kind][1], "quantization_version": gguf.GGML_QUANT_VERSION}


def write_text(path: Path, state: dict[str, Tensor], config: TextConfig, kind: str) -> None:
    writer, tokenizer = gguf.GGUFWriter(str(path), "llama"), Tokenizer()
    made = "Answers questions about drawn scenes; trained from scratch by experiments/train_demo.py"
    set_values(writer, about("kvedge demo model", kind) | {
        "description": made, "context_length": config.context, "embedding_length": config.width,
        "block_count": config.layers, "feed_forward_length": config.hidden, "head_count": config.heads,
        "head_count_kv": config.kv_heads, "key_length": config.head_size, "value_length": config.head_size,
        "rope_dimension_count": config.head_size, "rope_freq_base": config.rope_base,
        "layer_norm_rms_eps": config.eps, "vocab_size": config.vocab,
        "tokenizer_model": "llama", "tokenizer_pre": "default", "token_list": tokenizer.pieces,
        "token_scores": tokenizer.scores(), "token_types": tokenizer.token_types(), "bos_token_id": BOS,
        "eos_token_id": EOS, "unk_token_id": UNK, "add_bos_token": True, "add_eos_token": False,
        "add_space_prefix": True, "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    add_tensor(writer, "token_embd.weight", state["text.embed.weight"], kind)
    for k in range(config.layers):
        for ours, theirs in TEXT_NAMES.items():
            add_tensor(writer, f"blk.{k}.{theirs}.weight", state[f"text.blocks.{k}.{ours}.weight"], kind)
    add_tensor(writer, "output_norm.weight", state["text.norm.weight"], kind)
    add_tensor(writer, "output.weight", state["text.head.weight"], kind)
    finish(writer)


def write_mmproj(path: Path, tower: dict[str, Tensor], state: dict[str, Tensor], width: int, kind: str) -> None:
    c, writer = VisionConfig, gguf.GGUFWriter(str(path), "clip")
    set_values(writer, about("kvedge demo model, vision", kind) | {
        "clip_has_vision_encoder": True, "clip_projector_type": "mlp", "vision_image_size": IMAGE_SIZE,
        "vision_patch_size": CELL, "vision_embedding_length": c.width, "vision_feed_forward_length": c.hidden,
        "vision_block_count": c.layers, "vision_head_count": c.heads, "vision_projection_dim": width,
        "vision_attention_layernorm_eps": c.eps, "vision_image_mean": [0.5] * 3, "vision_image_std": [0.5] * 3,
        "vision_use_gelu": True,
    })  # fmt: skip
    writer.add_bool("clip.has_llava_projector", True)
    # llama.cpp's default for LLaVA is the last layer but one
    writer.add_array("clip.vision.feature_layer", [c.layers])
    add_tensor(writer, "v.patch_embd.weight", tower["patch.weight"].view(c.width, 3, CELL, CELL), kind)
    add_tensor(writer, "v.position_embd.weight", tower["position"], kind)
    parts = [(tower, name, f"v.{name}") for name in ("pre_ln", "post_ln")]
    parts += [
        (tower, f"blocks.{k}.{ours}", f"v.blk.{k}.{theirs}")
        for k in range(c.layers) for ours, theirs in VISION_NAMES.items()
    ]  # fmt: skip
    parts += [(state, f"projector.mm{n}", f"mm.{n}") for n in (0, 2)]
    for tensors, ours, theirs in parts:
        for part in ("weight", "bias"):
            add_tensor(writer, f"{theirs}.{part}", tensors[f"{ours}.{part}"], kind)
    finish(writer)


def convert(folder: Path, out: Path, kind: str, seed: int = 1) -> tuple[Path, Path]:
    """Writes both files of the checkpoint in `folder`. Returns their paths."""
    tower = load_tower(folder)
    learner = load_learner(folder, make_learner(seed, tower))
    state, config = learner.state_dict(), learner.text.c
    out.mkdir(parents=True, exist_ok=True)
    suffix = "" if kind == "q8_0" else f"-{kind}"
    text, mmproj = out / f"demo-model{suffix}.gguf", out / f"demo-mmproj{suffix}.gguf"
    write_text(text, state, config, kind)
    write_mmproj(mmproj, tower.state_dict(), state, config.width, kind)
    return text, mmproj
