"""Text models: the metadata and tensors that llama.cpp wants for each architecture.

Strengths are chosen so that random weights behave like a model rather than like noise: layers together
add about as much as one unit of residual, heads differ in how sharply they attend, and logits have a
standard deviation of a few units, so that greedy decoding has clear winners.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .tokens import Vocabulary
from .writer import F16, FILE_TYPES, Q4_0, Q6_K, Tensor, Value, fitting_type, matrix, vector

_HEAD_GAINS = (0.5, 2.0)
_KEY_GAIN = 1.5
_LOGIT_STD = 2.5
_HUSH = 0.04


@dataclass(frozen=True)
class TextSpec:
    """The shape of a text model."""

    arch: str
    vocab: Vocabulary
    n_layers: int
    n_heads: int
    n_heads_kv: int
    head_size: int
    n_ff: int
    n_ctx_train: int
    name: str = "random"
    rope_base: float = 10000.0
    eps: float = 1e-5
    tied: bool = False
    weight: GGMLQuantizationType = F16

    @property
    def n_embd(self) -> int:
        return self.n_heads * self.head_size

    @property
    def embedding_std(self) -> float:
        # A tied matrix is also the output: it has to have the size that gives good logits.
        return _LOGIT_STD / math.sqrt(self.n_embd) if self.tied else 1.0

    @property
    def out_gain(self) -> float:
        return 1 / math.sqrt(2 * self.n_layers)


Model = tuple[dict[str, Value], list[Tensor]]
Layer = Callable[[TextSpec, int], list[Tensor]]


def _base_meta(spec: TextSpec) -> dict[str, Value]:
    a = spec.arch
    return {
        "general.architecture": a,
        "general.type": "model",
        "general.name": spec.name,
        "general.description": "random weights: for tests and measurements, not for answers",
        "general.file_type": FILE_TYPES[spec.weight],
        "general.quantization_version": 2,
        f"{a}.vocab_size": spec.vocab.size,
        f"{a}.context_length": spec.n_ctx_train,
        f"{a}.embedding_length": spec.n_embd,
        f"{a}.block_count": spec.n_layers,
        f"{a}.feed_forward_length": spec.n_ff,
        f"{a}.attention.layer_norm_rms_epsilon": spec.eps,
    }


def _meta(spec: TextSpec) -> dict[str, Value]:
    """Of a model with attention in its layers."""
    a = spec.arch
    return {
        **_base_meta(spec),
        f"{a}.attention.head_count": spec.n_heads,
        f"{a}.attention.head_count_kv": spec.n_heads_kv,
        f"{a}.attention.key_length": spec.head_size,
        f"{a}.attention.value_length": spec.head_size,
        f"{a}.rope.dimension_count": spec.head_size,
        f"{a}.rope.freq_base": spec.rope_base,
    }


def _head_bands(heads: int, rows: int, unit: float) -> tuple[tuple[int, float], ...]:
    """Gains from flat to sharp, head by head: allocators that compare heads need heads that differ."""
    low, high = _HEAD_GAINS
    return tuple((rows, unit * low * (high / low) ** (h / max(1, heads - 1))) for h in range(heads))


def _norm(name: str, size: int, mean: float = 1.0) -> Tensor:
    return vector(name, size, mean=mean, std=0.1 * mean)


def _qkv(spec: TextSpec, b: str) -> list[Tensor]:
    n, unit = spec.n_embd, 1 / math.sqrt(spec.n_embd)
    kv = spec.n_heads_kv * spec.head_size
    bands = _head_bands(spec.n_heads, spec.head_size, unit)
    return [
        Tensor(f"{b}.attn_q.weight", (n, n), bands, 0.0, fitting_type(spec.weight, (n,))),
        matrix(f"{b}.attn_k.weight", (kv, n), _KEY_GAIN * unit, spec.weight),
        matrix(f"{b}.attn_v.weight", (kv, n), unit, spec.weight),
    ]


def _attn_out(spec: TextSpec, b: str, width: int | None = None) -> Tensor:
    width = width or spec.n_embd
    # Attention averages values, so its output is weaker than what it reads.
    std = 2 * spec.out_gain / math.sqrt(width)
    return matrix(f"{b}.attn_output.weight", (spec.n_embd, width), std, spec.weight)


def _ffn(spec: TextSpec, b: str) -> list[Tensor]:
    n, ff, unit = spec.n_embd, spec.n_ff, 1 / math.sqrt(spec.n_embd)
    return [
        _norm(f"{b}.ffn_norm.weight", n),
        matrix(f"{b}.ffn_gate.weight", (ff, n), unit, spec.weight),
        matrix(f"{b}.ffn_up.weight", (ff, n), unit, spec.weight),
        matrix(f"{b}.ffn_down.weight", (n, ff), 2 * spec.out_gain / math.sqrt(ff), spec.weight),
    ]


def _attention(spec: TextSpec, b: str) -> list[Tensor]:
    return [_norm(f"{b}.attn_norm.weight", spec.n_embd), *_qkv(spec, b), _attn_out(spec, b)]


def _ends(spec: TextSpec, output_norm: str = "output_norm.weight") -> list[Tensor]:
    n, shape = spec.n_embd, (spec.vocab.size, spec.n_embd)
    # As llama.cpp quantises: in a Q4_0 file the matrix that makes the logits is finer than the others.
    fine = Q6_K if spec.weight == Q4_0 and n % 256 == 0 else spec.weight
    logit = _LOGIT_STD / math.sqrt(n)
    loud = spec.vocab.bands(logit, _HUSH * logit)
    if spec.tied:
        # A norm of either sign: else the token just read, still in the residual, would always win.
        norm = vector(output_norm, n, std=1.0)
        return [Tensor("token_embd.weight", shape, loud, 0.0, fitting_type(fine, shape)), norm]
    return [
        matrix("token_embd.weight", shape, spec.embedding_std, spec.weight),
        _norm(output_norm, n),
        Tensor("output.weight", shape, loud, 0.0, fitting_type(fine, shape)),
    ]


def _stack(spec: TextSpec, layer: Layer) -> list[Tensor]:
    return [t for i in range(spec.n_layers) for t in layer(spec, i)]


def _plain(spec: TextSpec, i: int) -> list[Tensor]:
    return [*_attention(spec, f"blk.{i}"), *_ffn(spec, f"blk.{i}")]


def llama(spec: TextSpec) -> Model:
    """Llama and whatever else is the same to llama.cpp: Vicuna, MobileLLaMA, Mistral."""
    return _meta(spec), [*_ends(spec), *_stack(spec, _plain)]


def _biased(spec: TextSpec, i: int) -> list[Tensor]:
    b, kv = f"blk.{i}", spec.n_heads_kv * spec.head_size
    biases = [
        vector(f"{b}.attn_q.bias", spec.n_embd, std=0.5),
        vector(f"{b}.attn_k.bias", kv, std=0.5),
        vector(f"{b}.attn_v.bias", kv, std=0.1),
    ]
    return [*_plain(spec, i), *biases]


def mrope_sections(head_size: int) -> list[int]:
    """Rotary pairs for time, height and width, in the proportions of Qwen2-VL (16, 24, 24 of 64)."""
    pairs = head_size // 2
    space = 3 * pairs // 8
    return [pairs - 2 * space, space, space, 0]


def qwen2vl(spec: TextSpec) -> Model:
    meta = _meta(spec)
    meta["qwen2vl.rope.dimension_sections"] = mrope_sections(spec.head_size)
    return meta, [*_ends(spec), *_stack(spec, _biased)]


def _normed(spec: TextSpec, i: int) -> list[Tensor]:
    # Normalised queries and keys get their sharpness from the norm's weight.
    norms = [_norm(f"blk.{i}.attn_{x}_norm.weight", spec.head_size, mean=1.5) for x in "qk"]
    return [*_plain(spec, i), *norms]


def qwen3(spec: TextSpec) -> Model:
    return _meta(spec), [*_ends(spec), *_stack(spec, _normed)]


def phi3(spec: TextSpec) -> Model:
    """Phi-3: query, key and value in one matrix, gate and up in another."""

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, n, unit = f"blk.{i}", spec.n_embd, 1 / math.sqrt(spec.n_embd)
        kv = spec.n_heads_kv * spec.head_size
        bands = (*_head_bands(spec.n_heads, spec.head_size, unit), (kv, _KEY_GAIN * unit), (kv, unit))
        norm, _, up, down = _ffn(spec, b)
        fused = matrix(up.name, (2 * spec.n_ff, n), unit, spec.weight)
        qkv = Tensor(f"{b}.attn_qkv.weight", (n + 2 * kv, n), bands, 0.0, fitting_type(spec.weight, (n,)))
        return [_norm(f"{b}.attn_norm.weight", n), qkv, _attn_out(spec, b), norm, fused, down]

    return _meta(spec), [*_ends(spec), *_stack(spec, layer)]


def gemma3(spec: TextSpec) -> Model:
    """Gemma 3: sliding-window layers (32 tokens) with a full one after each."""

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        post = [f"blk.{i}.post_{x}_norm.weight" for x in ("attention", "ffw")]
        return [*_normed(spec, i), *(_norm(name, spec.n_embd, mean=spec.out_gain) for name in post)]

    meta = _meta(spec)
    meta["gemma3.attention.sliding_window"] = 32
    meta["gemma3.attention.sliding_window_pattern"] = 2
    ends = _ends(spec)
    # Gemma multiplies embeddings by the square root of their width.
    ends[0] = matrix("token_embd.weight", ends[0].shape, 1 / math.sqrt(spec.n_embd), spec.weight)
    return meta, [*ends, *_stack(spec, layer)]


def lfm2(spec: TextSpec) -> Model:
    """LFM2: short convolutions with an attention layer after each: a hybrid."""

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, n, unit = f"blk.{i}", spec.n_embd, 1 / math.sqrt(spec.n_embd)
        if i % 2:
            return _normed(spec, i)
        return [
            _norm(f"{b}.attn_norm.weight", n),
            vector(f"{b}.shortconv.conv.weight", (n, 3), std=0.6),
            matrix(f"{b}.shortconv.in_proj.weight", (3 * n, n), unit, spec.weight),
            matrix(f"{b}.shortconv.out_proj.weight", (n, n), spec.out_gain * unit, spec.weight),
            *_ffn(spec, b),
        ]

    meta = _meta(spec)
    meta["lfm2.shortconv.l_cache"] = 3
    meta["lfm2.attention.head_count_kv"] = [spec.n_heads_kv if i % 2 else 0 for i in range(spec.n_layers)]
    return meta, [*_ends(spec, "token_embd_norm.weight"), *_stack(spec, layer)]


def mamba(spec: TextSpec) -> Model:
    """Mamba: a recurrent state and no KV cache at all."""
    n, inner, state, conv, rank = spec.n_embd, 2 * spec.n_embd, 16, 4, max(32, spec.n_embd // 16)

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, w = f"blk.{i}", spec.weight
        return [
            _norm(f"{b}.attn_norm.weight", n),
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

    meta = _base_meta(spec) | {
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": conv,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
    }
    return meta, [*_ends(spec), *_stack(spec, layer)]


def deepseek2(spec: TextSpec) -> Model:
    """DeepSeek-V2: multi-head latent attention; every layer is dense here."""
    n, d, rope, rank, heads = spec.n_embd, spec.head_size, spec.head_size // 2, 64, spec.n_heads

    def layer(spec: TextSpec, i: int) -> list[Tensor]:
        b, unit, low, w = f"blk.{i}", 1 / math.sqrt(n), 1 / math.sqrt(rank), spec.weight
        q_rows, bands = heads * (d + rope), _head_bands(heads, d + rope, unit)
        return [
            _norm(f"{b}.attn_norm.weight", n),
            _norm(f"{b}.attn_kv_a_norm.weight", rank),
            Tensor(f"{b}.attn_q.weight", (q_rows, n), bands, 0.0, fitting_type(w, (n,))),
            matrix(f"{b}.attn_kv_a_mqa.weight", (rank + rope, n), _KEY_GAIN * unit, w),
            matrix(f"{b}.attn_k_b.weight", (heads, rank, d), _KEY_GAIN * low, w),
            matrix(f"{b}.attn_v_b.weight", (heads, d, rank), low, w),
            _attn_out(spec, b, heads * d),
            *_ffn(spec, b),
        ]

    meta = _meta(spec) | {
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
    return meta, [*_ends(spec), *_stack(spec, layer)]


ARCHITECTURES: dict[str, Callable[[TextSpec], Model]] = {
    "llama": llama,
    "qwen2vl": qwen2vl,
    "qwen3": qwen3,
    "phi3": phi3,
    "gemma3": gemma3,
    "lfm2": lfm2,
    "mamba": mamba,
    "deepseek2": deepseek2,
}


def text_model(spec: TextSpec) -> Model:
    """Metadata with the tokenizer in it, and tensors."""
    meta, tensors = ARCHITECTURES[spec.arch](spec)
    return meta | spec.vocab.meta, tensors
