"""GGUF files of a trained model: text model with tokenizer and chat template, and the mmproj, LLaVA-1.5 style."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from torch import Tensor

from kvedge_lab.demo_tasks.scenes import CELL, IMAGE_SIZE

from .text import TextConfig
from .tokenizer import BOS, CHAT_TEMPLATE, EOS, UNK, Tokenizer
from .train_text import load_learner, load_tower
from .vision import VisionConfig

TYPES = {
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}
TEXT_NAMES = {
    "ln1": "attn_norm",
    "ln2": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
VISION_NAMES = {
    "ln1": "ln1",
    "ln2": "ln2",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_out",
    "up": "ffn_up",
    "down": "ffn_down",
}


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    """Matrices in the file's type; vectors and position embeddings in F32, the patch convolution in F16."""
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


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokenizer.pieces)
    writer.add_token_scores(tokenizer.scores())
    writer.add_token_types(tokenizer.token_types())
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_text(path: Path, state: dict[str, Tensor], config: TextConfig, kind: str) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("kvedge demo model")
    writer.add_description("Answers questions about drawn scenes; trained from scratch by scripts/train_demo.py")
    writer.add_file_type(TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_vocab_size(config.vocab)
    _add_tokenizer(writer, Tokenizer())
    _add(writer, "token_embd.weight", state["text.embed.weight"], kind)
    for k in range(config.layers):
        for ours, theirs in TEXT_NAMES.items():
            _add(writer, f"blk.{k}.{theirs}.weight", state[f"text.blocks.{k}.{ours}.weight"], kind)
    _add(writer, "output_norm.weight", state["text.norm.weight"], kind)
    _add(writer, "output.weight", state["text.head.weight"], kind)
    _finish(writer)


def write_mmproj(path: Path, tower: dict[str, Tensor], state: dict[str, Tensor], width: int, kind: str) -> None:
    c = VisionConfig
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_name("kvedge demo model, vision")
    writer.add_file_type(TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_clip_has_vision_encoder(True)
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_clip_projector_type("mlp")
    writer.add_vision_image_size(IMAGE_SIZE)
    writer.add_vision_patch_size(CELL)
    writer.add_vision_embedding_length(c.width)
    writer.add_vision_feed_forward_length(c.hidden)
    writer.add_vision_block_count(c.layers)
    writer.add_vision_head_count(c.heads)
    writer.add_vision_projection_dim(width)
    writer.add_vision_attention_layernorm_eps(c.eps)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_use_gelu(True)
    # Without this llama.cpp would take LLaVA's default, the last layer but one.
    writer.add_array("clip.vision.feature_layer", [c.layers])
    _add(writer, "v.patch_embd.weight", tower["patch.weight"].view(c.width, 3, CELL, CELL), kind)
    _add(writer, "v.position_embd.weight", tower["position"], kind)
    for ours, theirs in (("pre_ln", "v.pre_ln"), ("post_ln", "v.post_ln")):
        for part in ("weight", "bias"):
            _add(writer, f"{theirs}.{part}", tower[f"{ours}.{part}"], kind)
    for k in range(c.layers):
        for ours, theirs in VISION_NAMES.items():
            for part in ("weight", "bias"):
                _add(writer, f"v.blk.{k}.{theirs}.{part}", tower[f"blocks.{k}.{ours}.{part}"], kind)
    for ours, theirs in (("mm0", "mm.0"), ("mm2", "mm.2")):
        for part in ("weight", "bias"):
            _add(writer, f"{theirs}.{part}", state[f"projector.{ours}.{part}"], kind)
    _finish(writer)


def convert(folder: Path, out: Path, kind: str, seed: int = 1) -> tuple[Path, Path]:
    """Both files of the checkpoint in `folder`."""
    tower, learner = load_tower(folder), load_learner(folder, seed)
    state, config = learner.state_dict(), learner.text.c
    out.mkdir(parents=True, exist_ok=True)
    suffix = "" if kind == "q8_0" else f"-{kind}"
    text, mmproj = out / f"demo-model{suffix}.gguf", out / f"demo-mmproj{suffix}.gguf"
    write_text(text, state, config, kind)
    write_mmproj(mmproj, tower.state_dict(), state, config.width, kind)
    return text, mmproj
