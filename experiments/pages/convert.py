"""Writes the GGUF files of the trained second model: Qwen2-VL's text model, and its tower with the merger."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from demo.checkpoint import load_learner
from demo.convert import TEXT_NAMES, VISION_NAMES, about, add_tensor, finish, set_values
from modelgen.layers import mrope_sections
from modelgen.tokens import CHATML, CONTROL, NORMAL, QWEN_SPECIALS
from torch import Tensor

from kvedge_lab.page_tasks.pages import CELL, COLUMNS

from .text import PageConfig
from .tokenizer import END, id_of, merges, pieces
from .train_text import load_tower, make_learner
from .vision import MEAN, PATCH, STD, TowerConfig

NAME = "kvedge pages model"


def write_text(path: Path, state: dict[str, Tensor], c: PageConfig, kind: str) -> None:
    writer, tokens = gguf.GGUFWriter(str(path), "qwen2vl"), pieces()
    made = "Answers questions about drawn pages; trained from scratch by experiments/train_pages.py"
    set_values(writer, about(NAME, kind) | {
        "description": made, "context_length": c.context, "embedding_length": c.width, "block_count": c.layers,
        "feed_forward_length": c.hidden, "head_count": c.heads, "head_count_kv": c.kv_heads,
        "key_length": c.head_size, "value_length": c.head_size, "rope_dimension_count": c.head_size,
        "rope_freq_base": c.rope_base, "rope_dimension_sections": mrope_sections(c.head_size),
        "layer_norm_rms_eps": c.eps, "vocab_size": c.vocab, "tokenizer_model": "gpt2", "tokenizer_pre": "qwen2",
        "token_list": tokens, "token_types": [CONTROL if t in QWEN_SPECIALS else NORMAL for t in tokens],
        "token_merges": merges(), "bos_token_id": id_of("<|endoftext|>"), "eos_token_id": id_of(END),
        "pad_token_id": id_of("<|endoftext|>"), "add_bos_token": False, "chat_template": CHATML,
    })  # fmt: skip
    add_tensor(writer, "token_embd.weight", state["text.embed.weight"], kind)
    for k in range(c.layers):
        for ours, theirs in TEXT_NAMES.items():
            for part in ("weight", "bias"):
                if f"text.blocks.{k}.{ours}.{part}" in state:
                    add_tensor(writer, f"blk.{k}.{theirs}.{part}", state[f"text.blocks.{k}.{ours}.{part}"], kind)
    add_tensor(writer, "output_norm.weight", state["text.norm.weight"], kind)
    add_tensor(writer, "output.weight", state["text.head.weight"], kind)
    finish(writer)


def write_mmproj(path: Path, tower: dict[str, Tensor], scale: Tensor, kind: str) -> None:
    """Writes the mmproj. Qwen2-VL's patches have two frames; the second gets weights of 0: a page does not move."""
    c, writer = TowerConfig, gguf.GGUFWriter(str(path), "clip")
    set_values(writer, about(f"{NAME}, vision", kind) | {
        "clip_has_vision_encoder": True, "clip_projector_type": "qwen2vl_merger",
        "vision_image_size": COLUMNS * CELL, "vision_patch_size": PATCH, "vision_embedding_length": c.width,
        "vision_feed_forward_length": c.hidden, "vision_block_count": c.layers, "vision_head_count": c.heads,
        "vision_projection_dim": c.out, "vision_attention_layernorm_eps": c.eps, "vision_image_mean": [MEAN] * 3,
        "vision_image_std": [STD] * 3, "vision_use_gelu": True, "vision_spatial_merge_size": 2,
    })  # fmt: skip
    patch = tower["patch.weight"].view(c.width, 3, PATCH, PATCH)
    add_tensor(writer, "v.patch_embd.weight", patch, kind)
    add_tensor(writer, "v.patch_embd.weight.1", torch.zeros_like(patch), kind)
    last = {part: tower[f"projector.mm2.{part}"] * scale for part in ("weight", "bias")}
    parts = [("post_ln", "v.post_ln")]
    for k in range(c.layers):
        parts += [(f"blocks.{k}.{ours}", f"v.blk.{k}.{theirs}") for ours, theirs in VISION_NAMES.items()]
    for ours, theirs in [*parts, ("projector.mm0", "mm.0")]:
        for part in ("weight", "bias"):
            add_tensor(writer, f"{theirs}.{part}", tower[f"{ours}.{part}"], kind)
    for part, tensor in last.items():
        add_tensor(writer, f"mm.2.{part}", tensor, kind)
    finish(writer)


def convert(folder: Path, out: Path, kind: str, seed: int = 1) -> tuple[Path, Path]:
    """Writes both files of the checkpoints in `folder`. Returns their paths."""
    tower = load_tower(folder)
    learner = load_learner(folder, make_learner(seed, tower))
    out.mkdir(parents=True, exist_ok=True)
    suffix = "" if kind == "q8_0" else f"-{kind}"
    text, mmproj = out / f"pages-model{suffix}.gguf", out / f"pages-mmproj{suffix}.gguf"
    write_text(text, learner.state_dict(), learner.text.c, kind)
    write_mmproj(mmproj, tower.state_dict(), learner.scale, kind)
    return text, mmproj
