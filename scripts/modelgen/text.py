"""Text models, architecture by architecture: layers.py says what they have in common."""

from __future__ import annotations

import math
from collections.abc import Callable

from . import text_more
from .layers import (
    KEY_GAIN,
    Model,
    TextSpec,
    attention_meta,
    attn_out,
    base_meta,
    biased,
    ends,
    ffn,
    head_bands,
    mrope_sections,
    norm,
    normed,
    plain,
    stack,
)
from .writer import Tensor, fitting_type, matrix, vector

__all__ = ["ARCHITECTURES", "Model", "TextSpec", "text_model"]


def llama(spec: TextSpec) -> Model:
    """Llama and whatever else is the same to llama.cpp: Vicuna, MobileLLaMA, Mistral."""
    return attention_meta(spec), [*ends(spec), *stack(spec, plain)]


def qwen2vl(spec: TextSpec) -> Model:
    meta = attention_meta(spec)
    meta["qwen2vl.rope.dimension_sections"] = mrope_sections(spec.head_size)
    return meta, [*ends(spec), *stack(spec, biased)]


def qwen3(spec: TextSpec) -> Model:
    return attention_meta(spec), [*ends(spec), *stack(spec, normed)]


def phi3(spec: TextSpec) -> Model:
    """Phi-3: query, key and value in one matrix, gate and up in another."""

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, n, unit = f"blk.{i}", spec.n_embd, 1 / math.sqrt(spec.n_embd)
        kv = spec.n_heads_kv * spec.head_size
        bands = (*head_bands(spec.n_heads, spec.head_size, unit), (kv, KEY_GAIN * unit), (kv, unit))
        ffn_norm, _, up, down = ffn(spec, b)
        fused = matrix(up.name, (2 * spec.n_ff, n), unit, spec.weight)
        qkv = Tensor(f"{b}.attn_qkv.weight", (n + 2 * kv, n), bands, 0.0, fitting_type(spec.weight, (n,)))
        return [norm(f"{b}.attn_norm.weight", n), qkv, attn_out(spec, b), ffn_norm, fused, down]

    return attention_meta(spec), [*ends(spec), *stack(spec, layer)]


def gemma3(spec: TextSpec) -> Model:
    """Gemma 3: sliding-window layers (32 tokens) with a full one after each."""

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        post = [f"blk.{i}.post_{x}_norm.weight" for x in ("attention", "ffw")]
        return [*normed(spec, i), *(norm(name, spec.n_embd, mean=spec.out_gain) for name in post)]

    meta = attention_meta(spec)
    meta["gemma3.attention.sliding_window"] = 32
    meta["gemma3.attention.sliding_window_pattern"] = 2
    first, *last = ends(spec)
    # Gemma multiplies embeddings by the square root of their width.
    embedding = matrix("token_embd.weight", first.shape, 1 / math.sqrt(spec.n_embd), spec.weight)
    return meta, [embedding, *last, *stack(spec, layer)]


def lfm2(spec: TextSpec) -> Model:
    """LFM2: short convolutions with an attention layer after each: a hybrid."""

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, n, unit = f"blk.{i}", spec.n_embd, 1 / math.sqrt(spec.n_embd)
        if i % 2:
            return normed(spec, i)
        return [
            norm(f"{b}.attn_norm.weight", n),
            vector(f"{b}.shortconv.conv.weight", (n, 3), std=0.6),
            matrix(f"{b}.shortconv.in_proj.weight", (3 * n, n), unit, spec.weight),
            matrix(f"{b}.shortconv.out_proj.weight", (n, n), spec.out_gain * unit, spec.weight),
            *ffn(spec, b),
        ]

    meta = attention_meta(spec)
    meta["lfm2.shortconv.l_cache"] = 3
    meta["lfm2.attention.head_count_kv"] = [spec.n_heads_kv if i % 2 else 0 for i in range(spec.n_layers)]
    return meta, [*ends(spec, "token_embd_norm.weight"), *stack(spec, layer)]


def mamba(spec: TextSpec) -> Model:
    """Mamba: a recurrent state and no KV cache at all."""
    n, inner, state, conv, rank = spec.n_embd, 2 * spec.n_embd, 16, 4, max(32, spec.n_embd // 16)

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, w = f"blk.{i}", spec.weight
        return [
            norm(f"{b}.attn_norm.weight", n),
            matrix(f"{b}.ssm_in.weight", (2 * inner, n), 1 / math.sqrt(n), w),
            vector(f"{b}.ssm_conv1d.weight", (inner, conv), std=0.5),
            vector(f"{b}.ssm_conv1d.bias", inner, std=0.1),
            matrix(f"{b}.ssm_x.weight", (rank + 2 * state, inner), 1 / math.sqrt(inner), w),
            matrix(f"{b}.ssm_dt.weight", (inner, rank), 1 / math.sqrt(rank), w),
            vector(f"{b}.ssm_dt.bias", inner, mean=-3.0, std=1.0),
            vector(f"{b}.ssm_a", (inner, state), mean=-1.0, std=0.2),
            vector(f"{b}.ssm_d", inner, mean=1.0, std=0.1),
            matrix(f"{b}.ssm_out.weight", (n, inner), 2 * spec.out_gain / math.sqrt(inner), w),
        ]

    meta = base_meta(spec) | {
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": conv,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
    }
    return meta, [*ends(spec), *stack(spec, layer)]


def deepseek2(spec: TextSpec) -> Model:
    """DeepSeek-V2: multi-head latent attention; every layer is dense here."""
    n, d, rope, rank, heads = spec.n_embd, spec.head_size, spec.head_size // 2, 64, spec.n_heads

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, unit, low, w = f"blk.{i}", 1 / math.sqrt(n), 1 / math.sqrt(rank), spec.weight
        q_rows, bands = heads * (d + rope), head_bands(heads, d + rope, unit)
        return [
            norm(f"{b}.attn_norm.weight", n),
            norm(f"{b}.attn_kv_a_norm.weight", rank),
            Tensor(f"{b}.attn_q.weight", (q_rows, n), bands, 0.0, fitting_type(w, (n,))),
            matrix(f"{b}.attn_kv_a_mqa.weight", (rank + rope, n), KEY_GAIN * unit, w),
            matrix(f"{b}.attn_k_b.weight", (heads, rank, d), KEY_GAIN * low, w),
            matrix(f"{b}.attn_v_b.weight", (heads, d, rank), low, w),
            attn_out(spec, b, heads * d),
            *ffn(spec, b),
        ]

    meta = attention_meta(spec) | {
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length": rank + rope,
        "deepseek2.attention.value_length": rank,
        "deepseek2.attention.key_length_mla": d + rope,
        "deepseek2.attention.value_length_mla": d,
        "deepseek2.attention.kv_lora_rank": rank,
        "deepseek2.attention.q_lora_rank": 0,
        "deepseek2.rope.dimension_count": rope,
        "deepseek2.leading_dense_block_count": spec.n_layers,
        "deepseek2.expert_feed_forward_length": spec.n_ff,
        "deepseek2.expert_shared_count": 0,
    }
    return meta, [*ends(spec), *stack(spec, layer)]


ARCHITECTURES: dict[str, Callable[[TextSpec], Model]] = {
    "llama": llama,
    "qwen2vl": qwen2vl,
    "qwen3": qwen3,
    "phi3": phi3,
    "gemma3": gemma3,
    "lfm2": lfm2,
    "mamba": mamba,
    "deepseek2": deepseek2,
    **text_more.ARCHITECTURES,
}


def text_model(spec: TextSpec) -> Model:
    """Metadata with the tokenizer in it, and tensors."""
    meta, tensors = ARCHITECTURES[spec.arch](spec)
    return meta | spec.vocab.meta, tensors
